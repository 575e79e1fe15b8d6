//! See `lily_fuzz::streams`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lily_fuzz::streams::check(data));
