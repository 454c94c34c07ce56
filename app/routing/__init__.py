"""Decisions about requests. Pure: no Ray, no vLLM, no clock of its own."""
