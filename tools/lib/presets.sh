# Building and testing a preset of CMakePresets.json. Sourced by the scripts in tools/.

build_preset() {
    cmake --preset "$1"
    cmake --build --preset "$1" --target headlong_tests headlong_cli headlong_shared headlong_parts headlong_fuzz \
        readme_example example_attention example_chat example_event_loop -j "$(nproc)"
}

test_preset() {
    local run=(ctest --preset "$1" -j "$(nproc)")
    # gcc's ThreadSanitizer needs the memory map of a process without address randomisation.
    [[ $1 != tsan ]] || run=(setarch -R "${run[@]}")
    "${run[@]}"
}
