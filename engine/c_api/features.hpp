// Which parts this build has. Both can be left out (engine/CMakeLists.txt).
#pragma once

#ifndef HEADLONG_MODELS
#define HEADLONG_MODELS 1
#endif

#ifndef HEADLONG_TBB
#define HEADLONG_TBB 1
#endif
