# Builds for Apple silicon on any machine, with Python's ziglang package: cmake --toolchain macos.cmake
find_program(ZIG python-zig REQUIRED)
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
foreach(language C CXX)
  set(CMAKE_${language}_COMPILER_TARGET aarch64-macos.14.0)
endforeach()
set(CMAKE_C_COMPILER ${ZIG} cc)
set(CMAKE_CXX_COMPILER ${ZIG} c++)
set(CMAKE_INSTALL_NAME_TOOL true)  # CMake wants one, and nothing here needs it
set(CMAKE_INSTALL_NAME_DIR @rpath)
set(CMAKE_BUILD_WITH_INSTALL_NAME_DIR ON)
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)  # no symbols beyond those that the loader reads, and no paths of this machine
