"""Vision transformer (Dosovitskiy et al., 2020) with timm's names, layouts and first values."""

import actorflow as af
from actorflow import nn


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def __call__(self, x):
        return self.fc2(af.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, ratio):
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.Attention(dim, heads=heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, dim * ratio)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, patch, channels, dim):
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)

    def __call__(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """x [N, channels, size, size] -> scores [N, num_classes], read off the token of the class."""

    def __init__(
        self,
        num_classes=1000,
        *,
        size=224,
        patch=16,
        channels=3,
        dim=384,
        depth=12,
        heads=6,
        ratio=4,
    ):
        zeros = (("kind", "zeros"),)
        self.cls_token = nn.Parameter((1, 1, dim), zeros)
        self.pos_embed = nn.Parameter((1, 1 + (size // patch) ** 2, dim), zeros)
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.patch_embed = PatchEmbed(patch, channels, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads, ratio) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        for _, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def __call__(self, x):
        patches = self.patch_embed(x)
        first = self.cls_token.expand(len(patches), 1, patches.shape[-1])
        h = self.blocks(af.concat([first, patches], axis=1) + self.pos_embed)
        return self.head(self.norm(h)[:, 0])


def vit_small_patch16_224(num_classes=1000, **options):
    """ViT-S/16: 22 M parameters."""
    return VisionTransformer(num_classes, **options)
