"""Parts of `./scripts/bench streaming`: a tiny model, the arms' servers, a load generator, and the figures."""
