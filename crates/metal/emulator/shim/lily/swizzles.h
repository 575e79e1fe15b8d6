// Names of components, all pairs and the longer ones that kernels use: members of a union with the components.
#pragma once

#define LILY_SWIZZLES_2                                                                                                          \
    Swizzle<T, 2, 0, 0> xx; Swizzle<T, 2, 0, 1> xy; Swizzle<T, 2, 1, 0> yx; Swizzle<T, 2, 1, 1> yy; Swizzle<T, 2, 0, 0> rr;  \
    Swizzle<T, 2, 0, 1> rg; Swizzle<T, 2, 1, 0> gr; Swizzle<T, 2, 1, 1> gg;
#define LILY_SWIZZLES_3                                                                                                          \
    Swizzle<T, 3, 0, 0> xx; Swizzle<T, 3, 0, 1> xy; Swizzle<T, 3, 0, 2> xz; Swizzle<T, 3, 1, 0> yx; Swizzle<T, 3, 1, 1> yy;  \
    Swizzle<T, 3, 1, 2> yz; Swizzle<T, 3, 2, 0> zx; Swizzle<T, 3, 2, 1> zy; Swizzle<T, 3, 2, 2> zz; Swizzle<T, 3, 0, 1, 2> xyz;  \
    Swizzle<T, 3, 2, 1, 0> zyx; Swizzle<T, 3, 0, 0, 0> xxx; Swizzle<T, 3, 0, 0> rr; Swizzle<T, 3, 0, 1> rg; Swizzle<T, 3, 0, 2> rb;  \
    Swizzle<T, 3, 1, 0> gr; Swizzle<T, 3, 1, 1> gg; Swizzle<T, 3, 1, 2> gb; Swizzle<T, 3, 2, 0> br; Swizzle<T, 3, 2, 1> bg;  \
    Swizzle<T, 3, 2, 2> bb; Swizzle<T, 3, 0, 1, 2> rgb; Swizzle<T, 3, 2, 1, 0> bgr; Swizzle<T, 3, 0, 0, 0> rrr;
#define LILY_SWIZZLES_4                                                                                                          \
    Swizzle<T, 4, 0, 0> xx; Swizzle<T, 4, 0, 1> xy; Swizzle<T, 4, 0, 2> xz; Swizzle<T, 4, 0, 3> xw; Swizzle<T, 4, 1, 0> yx;  \
    Swizzle<T, 4, 1, 1> yy; Swizzle<T, 4, 1, 2> yz; Swizzle<T, 4, 1, 3> yw; Swizzle<T, 4, 2, 0> zx; Swizzle<T, 4, 2, 1> zy;  \
    Swizzle<T, 4, 2, 2> zz; Swizzle<T, 4, 2, 3> zw; Swizzle<T, 4, 3, 0> wx; Swizzle<T, 4, 3, 1> wy; Swizzle<T, 4, 3, 2> wz;  \
    Swizzle<T, 4, 3, 3> ww; Swizzle<T, 4, 0, 1, 2> xyz; Swizzle<T, 4, 1, 2, 3> yzw; Swizzle<T, 4, 2, 1, 0> zyx;  \
    Swizzle<T, 4, 0, 1, 2, 3> xyzw; Swizzle<T, 4, 3, 2, 1, 0> wzyx; Swizzle<T, 4, 1, 2, 3, 0> yzwx; Swizzle<T, 4, 2, 3, 0, 1> zwxy;  \
    Swizzle<T, 4, 1, 0, 3, 2> yxwz; Swizzle<T, 4, 0, 0, 0, 0> xxxx; Swizzle<T, 4, 0, 0> rr; Swizzle<T, 4, 0, 1> rg;  \
    Swizzle<T, 4, 0, 2> rb; Swizzle<T, 4, 0, 3> ra; Swizzle<T, 4, 1, 0> gr; Swizzle<T, 4, 1, 1> gg; Swizzle<T, 4, 1, 2> gb;  \
    Swizzle<T, 4, 1, 3> ga; Swizzle<T, 4, 2, 0> br; Swizzle<T, 4, 2, 1> bg; Swizzle<T, 4, 2, 2> bb; Swizzle<T, 4, 2, 3> ba;  \
    Swizzle<T, 4, 3, 0> ar; Swizzle<T, 4, 3, 1> ag; Swizzle<T, 4, 3, 2> ab; Swizzle<T, 4, 3, 3> aa; Swizzle<T, 4, 0, 1, 2> rgb;  \
    Swizzle<T, 4, 1, 2, 3> gba; Swizzle<T, 4, 2, 1, 0> bgr; Swizzle<T, 4, 0, 1, 2, 3> rgba; Swizzle<T, 4, 3, 2, 1, 0> abgr;  \
    Swizzle<T, 4, 1, 2, 3, 0> gbar; Swizzle<T, 4, 2, 3, 0, 1> barg; Swizzle<T, 4, 1, 0, 3, 2> grab; Swizzle<T, 4, 0, 0, 0, 0> rrrr;
