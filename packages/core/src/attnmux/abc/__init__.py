"""The base classes of the contract; `attnmux.backend` re-exports them all."""
