"""What every decoder shares: requests, sequences in progress, outputs, grammars."""
