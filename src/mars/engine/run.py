"""The loop of a caller that has an engine to itself and its requests at hand: training and evaluation."""

from collections.abc import Generator, Iterable
from itertools import islice

from mars.core.output import OutputProcessor, RequestOutput
from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.engine.engine import Engine


def run(
    engine: Engine, requests: Iterable[Request], max_waiting: int = 64
) -> Generator[tuple[int, RequestOutput], None, None]:
    """Every request's index and output as it finishes; those that have not are aborted when the caller stops early.

    Requests are taken from their source as the engine gets to them: ``max_waiting`` are queued.
    """
    source = enumerate(requests)
    running: dict[Sequence, int] = {}
    try:
        while True:
            for index, request in islice(source, max(0, max_waiting - engine.num_waiting)):
                sequence = engine.add_request(request)
                attach_processor(engine, sequence)
                running[sequence] = index
            if not running:
                return
            for sequence in engine.step():
                ended = stop_found(engine, sequence) or sequence.is_finished
                if ended and sequence in running:
                    yield running.pop(sequence), sequence.output
    finally:
        for sequence in running:
            engine.abort(sequence)


def attach_processor(engine: Engine, sequence: Sequence) -> OutputProcessor:
    """Have the sequence's output turned into text."""
    return OutputProcessor(sequence.output, engine.checkpoint.tokenizer, sequence.end_tokens, sequence.request.stop)


def stop_found(engine: Engine, sequence: Sequence) -> bool:
    """Look for stop strings in new text; a sequence that has one leaves the engine."""
    processor = sequence.output.processor
    if processor is None or not processor.has_stops:
        return False
    processor.update()
    if sequence.is_finished:
        engine.abort(sequence)
    return sequence.is_finished
