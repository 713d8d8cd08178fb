"""From bytes to tensors: checkpoints, and where their weights lie. Independent of tokens, trees and architectures."""
