"""The ATen→JAX entries, one file per op family; `tpu_train.lowering.table` joins them."""
