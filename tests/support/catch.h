// tests/support/catch.h: Catch2, whichever version the system has (2.13: Debian 12, Ubuntu 22.04; 3: later ones).
#pragma once

#if HYBRIDPS_CATCH_MAJOR >= 3
#include <catch2/catch_all.hpp>
using Catch::Approx;  // as in version 2, whose header puts it within reach
#else
#include <catch2/catch.hpp>
#endif
