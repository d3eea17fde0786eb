"""What the tests share: real ranks, the reference loop, small models, and one training run of the engine."""
