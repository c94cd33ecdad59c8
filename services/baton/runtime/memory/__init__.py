"""Process memory: allocation, return of freed memory, garbage collection."""
