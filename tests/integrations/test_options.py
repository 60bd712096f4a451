"""The plugin's options: what clients send is not kept."""

from __future__ import annotations

from mars.integrations.vllm import options


def test_dials_that_clients_send_are_not_kept_without_bound() -> None:
    for number in range(5000):
        assert options.parse_dial(f"relaxed={0.1 + number / 1e4}").kind == "relaxed"
    assert options._parse.cache_info().currsize < 2000
