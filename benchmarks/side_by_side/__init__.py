"""Engines measured side by side: same model, same data, same seeds, in turns within one run."""
