"""What policies act in: bodies and their physics (MuJoCo), pictures computed from positions. Nothing here learns."""
