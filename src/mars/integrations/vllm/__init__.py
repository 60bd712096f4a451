"""MARS inside vLLM: ``vllm serve CHECKPOINT --speculative-config '{"method": "mars"}'``.

To vLLM a step is speculative decoding whose drafts are what the model's own masks said in the forward before, followed
by masks that ride along and are always rejected. vLLM finds this package through its entry points.
"""


def register() -> None:
    """What vLLM calls in each of its processes."""
    from mars.integrations.vllm.arguments import install

    install()
