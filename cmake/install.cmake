# What `cmake --install` puts where: both libraries, the header, flashattn.pc, the CMake package. Paths inside are
# relative, so that an installed tree can be moved.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashattn)

install(TARGETS flashattn flashattn_static EXPORT flashattn-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES include/flashattn.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT flashattn-targets NAMESPACE flashattn:: DESTINATION ${package_dir})

configure_package_config_file(cmake/flashattn-config.cmake.in ${PROJECT_BINARY_DIR}/flashattn-config.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break what the one before promised.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flashattn-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flashattn-config.cmake ${PROJECT_BINARY_DIR}/flashattn-config-version.cmake
        DESTINATION ${package_dir})

file(RELATIVE_PATH pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/flashattn.pc.in ${PROJECT_BINARY_DIR}/flashattn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flashattn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
