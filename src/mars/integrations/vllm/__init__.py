"""MARS inside vLLM: ``vllm serve CHECKPOINT --speculative-config '{"method": "mars"}'``.

To vLLM a step is speculative decoding. The drafts are what the model's own masks predicted in the forward before; the
masks behind them are drafts that are always rejected. vLLM finds this package through its entry points, and calls
``register`` in each of its processes.
"""

from mars.integrations.vllm.config import install as register

__all__ = ["register"]
