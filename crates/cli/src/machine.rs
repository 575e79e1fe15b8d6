//! What the system says of the machine and of this process: processor, memory, limits, what is resident.

use std::path::Path;

/// Memory of this process that is in physical memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// The most there ever was.
    pub peak: u64,
    /// Of it now, what belongs to the process alone: it cannot be dropped. `None` where the system does not tell.
    pub anonymous: Option<u64>,
    /// Of it now, pages of files, above all of the mapped weights: the page cache, which the system can drop and
    /// read again. `None` where the system does not tell.
    pub mapped: Option<u64>,
}

/// The processor's name, or its architecture where the system does not name it.
pub fn cpu_name() -> String {
    system::cpu_name().unwrap_or_else(|| std::env::consts::ARCH.to_string())
}

/// Bytes of memory that this process can have at the most: the machine's, or the control group's where that is
/// less. `None` where the system does not tell.
pub fn memory_bytes() -> Option<u64> {
    system::memory_bytes()
}

/// Bytes of memory that the machine has, whatever of them this process may have.
pub fn installed_bytes() -> Option<u64> {
    system::installed_bytes()
}

/// Something that the system gives a process so much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Open files and connections.
    OpenFiles,
    /// Bytes of addresses, mapped files among them.
    AddressSpace,
}

/// How much of `resource` this process can have; [`u64::MAX`] is as much as it likes, `None` that the system does not
/// tell.
pub fn limit(resource: Resource) -> Option<u64> {
    system::limit(resource)
}

/// The limit that is called `name` in a text like `/proc/self/limits`: name, limit in force, highest, unit.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn limit_field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    if value == "unlimited" { Some(u64::MAX) } else { value.parse().ok() }
}

/// What of this process is resident; `None` where the system does not tell.
pub fn resident() -> Option<Resident> {
    system::resident()
}

/// The bytes of the field `name` of a file like `/proc/meminfo`, whose values are in KiB.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// The lowest limit that the control groups of `membership` (the text of `/proc/self/cgroup`) and their parents
/// set, where the groups' file systems are under `root`. Versions 1 and 2.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn group_limit(root: &Path, membership: &str) -> Option<u64> {
    let limits = membership.lines().filter_map(|line| {
        let (_, line) = line.split_once(':')?;
        let (controllers, group) = line.split_once(':')?;
        let (mount, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let group = Path::new(group.trim_start_matches('/'));
        let limit = |group: &Path| {
            std::fs::read_to_string(mount.join(group).join(file)).ok()?.trim().parse::<u64>().ok()
        };
        group.ancestors().filter_map(limit).min()
    });
    limits.min()
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs::read_to_string;
    use std::path::Path;

    use super::{Resident, Resource, group_limit, kib_field, limit_field};

    pub fn cpu_name() -> Option<String> {
        let text = read_to_string("/proc/cpuinfo").ok()?;
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_string())
    }

    pub fn installed_bytes() -> Option<u64> {
        kib_field(&read_to_string("/proc/meminfo").ok()?, "MemTotal")
    }

    pub fn limit(resource: Resource) -> Option<u64> {
        let name = match resource {
            Resource::OpenFiles => "Max open files",
            Resource::AddressSpace => "Max address space",
        };
        limit_field(&read_to_string("/proc/self/limits").ok()?, name)
    }

    pub fn memory_bytes() -> Option<u64> {
        let machine = installed_bytes()?;
        let membership = read_to_string("/proc/self/cgroup").unwrap_or_default();
        Some(
            group_limit(Path::new("/sys/fs/cgroup"), &membership).map_or(machine, |limit| limit.min(machine)),
        )
    }

    pub fn resident() -> Option<Resident> {
        let text = read_to_string("/proc/self/status").ok()?;
        Some(Resident {
            peak: kib_field(&text, "VmHWM")?,
            anonymous: kib_field(&text, "RssAnon"),
            mapped: kib_field(&text, "RssFile"),
        })
    }
}

#[cfg(target_os = "macos")]
mod system {
    use std::ffi::CStr;

    use super::{Resident, Resource};

    /// Fills `value` with what the system calls `name`; the bytes that there were.
    fn read(name: &CStr, value: &mut [u8]) -> Option<usize> {
        let mut length = value.len();
        // SAFETY: `value` is writable for `length` bytes, and nothing is set.
        let failed = unsafe {
            libc::sysctlbyname(name.as_ptr(), value.as_mut_ptr().cast(), &mut length, std::ptr::null_mut(), 0)
        };
        (failed == 0).then_some(length)
    }

    pub fn cpu_name() -> Option<String> {
        let mut name = [0; 256];
        let length = read(c"machdep.cpu.brand_string", &mut name)?;
        CStr::from_bytes_until_nul(&name[..length]).ok()?.to_str().ok().map(str::to_string)
    }

    pub fn memory_bytes() -> Option<u64> {
        let mut bytes = [0; size_of::<u64>()];
        (read(c"hw.memsize", &mut bytes)? == bytes.len()).then(|| u64::from_ne_bytes(bytes))
    }

    pub fn installed_bytes() -> Option<u64> {
        memory_bytes()
    }

    pub fn limit(resource: Resource) -> Option<u64> {
        let resource = match resource {
            Resource::OpenFiles => libc::RLIMIT_NOFILE,
            Resource::AddressSpace => libc::RLIMIT_AS,
        };
        let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limits` is writable.
        let failed = unsafe { libc::getrlimit(resource, &mut limits) };
        let limit = limits.rlim_cur;
        (failed == 0).then_some(if limit == libc::RLIM_INFINITY { u64::MAX } else { limit })
    }

    pub fn resident() -> Option<Resident> {
        // SAFETY: all zeros are a value of this struct of numbers.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: `usage` is writable.
        let failed = unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
        // In bytes on this system.
        let peak = u64::try_from(usage.ru_maxrss).ok()?;
        (failed == 0).then_some(Resident { peak, anonymous: None, mapped: None })
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod system {
    use super::{Resident, Resource};

    pub fn cpu_name() -> Option<String> {
        None
    }

    pub fn installed_bytes() -> Option<u64> {
        None
    }

    pub fn limit(_: Resource) -> Option<u64> {
        None
    }

    pub fn memory_bytes() -> Option<u64> {
        None
    }

    pub fn resident() -> Option<Resident> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_lowest_limit_on_the_way_to_the_root_counts() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("a/memory.max", "5000\n");
        write("a/b/memory.max", "max\n");
        write("memory/c/memory.limit_in_bytes", "4000\n");
        assert_eq!(group_limit(root, "0::/a/b\n"), Some(5000));
        assert_eq!(group_limit(root, "0::/elsewhere\n"), None);
        assert_eq!(group_limit(root, "3:cpu,memory:/c\n2:cpu:/a\n0::/a\n"), Some(4000));
        assert_eq!(group_limit(root, "nonsense"), None);
    }

    #[test]
    fn limits_are_read_in_the_form_of_the_system() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max address space         unlimited            unlimited            bytes     \n\
                    Max open files            1024                 1048576              files     \n";
        assert_eq!(limit_field(text, "Max open files"), Some(1024));
        assert_eq!(limit_field(text, "Max address space"), Some(u64::MAX));
        assert_eq!(limit_field(text, "Max locked memory"), None);
    }

    #[test]
    fn fields_are_read_by_their_whole_name() {
        let text = "MemTotalX: 1 kB\nMemTotal:    24684092 kB\nOther: 3\n";
        assert_eq!(kib_field(text, "MemTotal"), Some(24_684_092 << 10));
        assert_eq!(kib_field(text, "Other"), None);
    }
}
