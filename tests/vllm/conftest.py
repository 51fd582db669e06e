"""Tests against a real vLLM, in an environment of its own: `make test-vllm`. Without vLLM nothing is collected."""

import importlib.util
import os

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("vllm") is None else []

# Before vLLM is imported: no network, no statistics, an engine in the process of the test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
