# What `cmake --install` copies, and what `cpack` makes .deb packages of. An installed tree may be moved.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS headlong_shared
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT development)
install(TARGETS headlong ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(DIRECTORY include/headlong DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
    FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp" PATTERN "mimalloc.hpp" EXCLUDE)
if(HEADLONG_MIMALLOC)  # the adapter is a header and an archive, for programs
    install(FILES include/headlong/mimalloc.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/headlong COMPONENT development)
    install(TARGETS headlong_mimalloc ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT license)  # of packages: see below
if(HEADLONG_TOOLS)
    install(TARGETS headlong_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
    install(FILES tools/packaging/headlong.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT tools)
endif()

# The CMake package and the pkg-config file say where they are by their own place.
set(headlong_shared_file "${CMAKE_SHARED_LIBRARY_PREFIX}headlong${CMAKE_SHARED_LIBRARY_SUFFIX}")
set(headlong_soname "${headlong_shared_file}.${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}")
set(headlong_static_file "${CMAKE_STATIC_LIBRARY_PREFIX}headlong${CMAKE_STATIC_LIBRARY_SUFFIX}")
set(headlong_mimalloc_file "${CMAKE_STATIC_LIBRARY_PREFIX}headlong_mimalloc${CMAKE_STATIC_LIBRARY_SUFFIX}")
set(headlong_find_dependencies "")
set(headlong_static_libraries "")
set(headlong_private_libraries "-lstdc++ -lm")
if(HEADLONG_MODELS)  # else fmt's headers alone are used
    string(APPEND headlong_find_dependencies "find_dependency(fmt)")
    list(APPEND headlong_static_libraries fmt::fmt)
    string(PREPEND headlong_private_libraries "-lfmt ")
endif()
if(HEADLONG_TBB)
    string(APPEND headlong_find_dependencies "\n    find_dependency(TBB)")
    list(APPEND headlong_static_libraries TBB::tbb)
    string(PREPEND headlong_private_libraries "-ltbb ")
endif()
if(HEADLONG_MODELS)
    list(APPEND headlong_static_libraries pcre2-8 utf8proc)
    string(PREPEND headlong_private_libraries "-lpcre2-8 -lutf8proc ")
endif()
set(headlong_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/headlong)
configure_package_config_file(tools/packaging/headlongConfig.cmake.in
    ${PROJECT_BINARY_DIR}/packaging/headlongConfig.cmake
    INSTALL_DESTINATION ${headlong_package_dir}
    PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/packaging/headlongConfigVersion.cmake
    COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/packaging/headlongConfig.cmake
        ${PROJECT_BINARY_DIR}/packaging/headlongConfigVersion.cmake
    DESTINATION ${headlong_package_dir} COMPONENT development)
# Folders that were given whole (Nix, some distributions) are named whole: such a tree cannot be moved.
set(headlong_pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
set(headlong_pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
if(IS_ABSOLUTE ${CMAKE_INSTALL_INCLUDEDIR})
    set(headlong_pc_includedir ${CMAKE_INSTALL_INCLUDEDIR})
endif()
if(IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR})
    set(headlong_pc_libdir ${CMAKE_INSTALL_LIBDIR})
    set(headlong_pc_prefix ${CMAKE_INSTALL_PREFIX})
else()
    file(RELATIVE_PATH headlong_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
    string(REGEX REPLACE "/$" "" headlong_pc_prefix "\${pcfiledir}/${headlong_pc_prefix}")
endif()
configure_file(tools/packaging/headlong.pc.in ${PROJECT_BINARY_DIR}/packaging/headlong.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/packaging/headlong.pc
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)

# Packages, by cpack: the library, what programs are built with, the command line.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_VENDOR "The Headlong authors")
set(CPACK_PACKAGE_CONTACT "The Headlong authors <headlong@example.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL library development)
if(HEADLONG_TOOLS)
    list(APPEND CPACK_COMPONENTS_ALL tools)
endif()
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)  # for packages of others that link the library
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(headlong_library_package libheadlong${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME ${headlong_library_package})
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libheadlong-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "${headlong_library_package} (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_RECOMMENDS  # what the archive and tbb.hpp are linked with; the library needs none
    "libtbb-dev, libfmt-dev, libpcre2-dev, libutf8proc-dev")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SUGGESTS libmimalloc-dev)
set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME headlong)
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION utils)
# Each package has the licence in a folder of its own: versions of the library are installed side by side.
foreach(component IN LISTS CPACK_COMPONENTS_ALL)
    string(TOUPPER ${component} component_upper)
    install(FILES LICENSE RENAME copyright COMPONENT ${component} EXCLUDE_FROM_ALL
        DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/${CPACK_DEBIAN_${component_upper}_PACKAGE_NAME})
endforeach()
include(CPack)
