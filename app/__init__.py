"""Sluice: class-aware LLM serving on Ray Serve and vLLM.

Packages, in the order in which imports may point (each may import those after it):
`main` → `api` → `pools` → `engine` → `routing`, `telemetry` → `config`, `types`, `errors`.
"""

__version__ = "0.1.0"
