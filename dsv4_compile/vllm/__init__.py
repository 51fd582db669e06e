"""What there is for vLLM: a plugin that switches the passes on and says what runs, and a check of its settings.

`import dsv4_compile.vllm` imports no vLLM.
"""
