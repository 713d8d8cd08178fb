"""What a device that computes offers beside torch's operations, behind one protocol: `accelerator.Accelerator`."""
