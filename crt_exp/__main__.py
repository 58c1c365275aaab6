from crt_exp.train import main

main()
