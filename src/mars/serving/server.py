"""``mars serve``: options in, a running server out."""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address

import uvicorn
from rich.console import Console
from uvicorn.loops.auto import auto_loop_factory

from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.models import builtin
from mars.serving import logs
from mars.serving.access import LOOPBACK_HOSTS
from mars.serving.app import create_app
from mars.serving.connections import LimitedProtocol, raise_file_limit
from mars.serving.engine_client import EngineClient
from mars.serving.engine_process import EngineOptions, leave
from mars.serving.governor import Target
from mars.serving.messages import FromEngine, WarmingUp
from mars.serving.service import Rules, Service

DRAIN_SECONDS = 30
SWITCH_SECONDS = (
    0.0005  # that a thread which tokenises may keep the event loop waiting; Python's own are ten times that
)
log = logging.getLogger("mars.serving")


@dataclass(frozen=True, slots=True)
class Serving:
    model: str
    adapter: str | None
    dial: Dial | None
    floor: Dial | None
    host: str
    port: int
    max_num_seqs: int
    memory: float | None
    dtype: str | None
    batch_invariant: bool
    max_waiting: int
    max_new_tokens: int | None
    api_key: str | None
    admin_key: str | None
    name: str | None
    auto: bool
    target: Target
    log_level: str
    log_prompts: bool
    max_connections: int
    allowed_host: list[str] | None
    cors_origin: list[str] | None


def run(serving: Serving) -> None:
    """Serve until told to stop; then what is running may end within `DRAIN_SECONDS`."""
    rules = Rules(
        serving.api_key,
        serving.admin_key,
        serving.floor,
        max_new_tokens=serving.max_new_tokens,
        log_prompts=serving.log_prompts,
        cors_origins=tuple(serving.cors_origin or ()),
    )
    logs.install(serving.log_level)
    sys.setswitchinterval(SWITCH_SECONDS)
    if serving.dial is not None and not rules.allows(serving.dial):
        raise MarsError(f"the dial {serving.dial} is looser than the floor {serving.floor}")
    if serving.model in (builtin.NAME, builtin.BASE):
        builtin.fetch()  # shows its progress
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(_serve(serving, rules))
    leave(0)


async def _serve(serving: Serving, rules: Rules) -> None:
    console = Console(stderr=True, highlight=False)
    listening = _listen(serving.host, serving.port)
    host, port = listening.getsockname()[:2]
    rules = replace(rules, hosts=_hosts(host, serving.allowed_host or ()))
    if not ip_address(host).is_loopback and not serving.api_key:
        log.warning("anybody who can reach %s may ask, and turn the dial: set --api-key", host)
    client = EngineClient(
        EngineOptions(
            serving.model,
            serving.name,
            serving.adapter,
            serving.dtype,
            max_num_seqs=serving.max_num_seqs,
            memory=serving.memory,
            batch_invariant=serving.batch_invariant,
            max_waiting=serving.max_waiting,
            log_level=serving.log_level,
        )
    )
    if serving.dial is not None:
        client.set_dial(serving.dial)
    client.start()
    try:
        await _load(client, serving.model, console)
        service = Service(client, rules, auto=serving.auto, target=serving.target)
        governing = asyncio.create_task(service.govern())
        config = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            http=LimitedProtocol,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            lifespan="off",
        )
        gc.collect()
        gc.freeze()  # as the engine's process does
        LimitedProtocol.most = raise_file_limit(serving.max_connections)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        await _Server(config, lambda: _announce(service.name, url, console)).serve(sockets=[listening])
        governing.cancel()
    finally:
        await client.stop()


async def _load(client: EngineClient, model: str, console: Console) -> None:
    """Wait for the model; on a terminal, show how far it is."""
    if not console.is_terminal:
        log.info("loading", extra={"facts": {"model": model}})
        await client.ready()
        return
    with console.status(f"Loading {model} …") as status:

        def show(message: FromEngine) -> None:
            if isinstance(message, WarmingUp):
                status.update(f"Warming up: {message.done} of {message.total}")

        client.listeners.append(show)
        await client.ready()
        client.listeners.remove(show)


def _announce(name: str, url: str, console: Console) -> None:
    if console.is_terminal:
        console.print(f"Serving {name} on {url}", markup=False)
    else:
        log.warning("serving", extra={"facts": {"model": name, "url": url}})  # whatever the log's level is


def _hosts(address: str, allowed: Sequence[str]) -> frozenset[str] | None:
    """What the server may be called: on this machine alone, its usual names, so that no page elsewhere can reach it."""
    names = frozenset(each.lower() for each in allowed)
    if ip_address(address).is_loopback:
        return LOOPBACK_HOSTS | {address, f"[{address}]"} | names
    return names or None


class _Server(uvicorn.Server):
    """Stops by itself when told to, rather than by the signal that told it; told twice, at once."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def _listen(host: str, port: int) -> socket.socket:
    """Take the address before a model is loaded for nothing."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a chunk does not wait for the next one
        return listening
    except OSError as error:
        raise MarsError(f"{host}:{port} cannot be listened on: {error.strerror or error}") from None
