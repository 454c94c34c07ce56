"""What `./scripts/bench scheduling` is made of."""
