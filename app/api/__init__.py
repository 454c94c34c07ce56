"""The HTTP face: routes, the request's way, and how answers are streamed."""
