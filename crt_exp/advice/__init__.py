"""Which attention a pretrained model can have instead of its own: what each costs, and what that advises."""
