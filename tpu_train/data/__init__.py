"""Text to batches: tokenizers, sources of documents, the packed token stream, prefetching. NumPy only."""
