"""The Ray side of the pools: the deployment that runs an engine, and the client that the ingress calls it by."""
