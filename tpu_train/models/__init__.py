"""Models in pure single-device PyTorch: torch and each other, nothing else.

Key idea: a model is a function from plain sizes to a config tree (`node.py`), whose components take their children as
arguments; swapping a kernel, naming a parameter for sharding and reading the model all go by the same paths.

The legend of dimension letters, for shapes in every docstring:
    B batch            S tokens of a sequence      T slots of keys and values (S without a cache)
    D model width      H query heads               K key/value heads
    N head width       F feed-forward width        V vocabulary
    L layers
"""
