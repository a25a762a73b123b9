"""The same kit for latent attention: its reference, scenarios and how a backend is driven."""
