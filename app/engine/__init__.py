"""Everything that touches vLLM. Each module names what it relies on; tests/integration/test_vllm_seams.py checks it."""
