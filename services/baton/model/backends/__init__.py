"""Ways to run a model, from the model's own code to a decoder in C++."""
