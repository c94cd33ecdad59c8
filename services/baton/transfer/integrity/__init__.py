"""Block generations, and the validation that a read saw exactly one generation."""
