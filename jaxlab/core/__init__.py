"""What every experiment may use: training, checkpoints, metrics, progress, meshes, pytrees, configs, reports."""
