"""Do the kernels of this device compute what plain torch does, at one model's shapes? On memory full of NaN."""
