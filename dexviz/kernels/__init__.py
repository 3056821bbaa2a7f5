"""Operators on score maps S = Σ_t A_t ∘ (U_t W_tᵀ), one concern a file; none of them holds N × N for all heads."""
