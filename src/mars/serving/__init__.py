"""An OpenAI-compatible server over the engine, with a dial that turns while it runs."""
