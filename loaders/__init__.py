"""From bytes to tensors: checkpoints and the placement of weights. Independent of tokens, trees and architectures."""
