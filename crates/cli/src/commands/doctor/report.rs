//! What was found, and the page that shows it.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::args::KvCacheType;

const GB: f64 = 1e9;
/// Columns in which names stand.
const NAME_WIDTH: usize = 14;

/// All of it, as `--json` prints it: sizes in bytes, contexts in tokens.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Of Lily.
    pub version: &'static str,
    /// The machine.
    pub machine: Machine,
    /// The model that is asked about.
    pub model: Model,
    /// What could run it.
    pub backends: Vec<Backend>,
    /// The backend that `--backend auto` takes.
    pub taken: &'static str,
    /// Why that one.
    pub reason: String,
    /// Where the model would be downloaded to; `None` where it is here.
    pub disk: Option<Disk>,
    /// What the system allows.
    pub limits: Vec<Limit>,
    /// What stands in the way, each with what to do; empty where the model can run.
    pub problems: Vec<String>,
    /// What to run next.
    pub next: String,
}

/// The machine.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// Operating system.
    pub system: &'static str,
    /// Instruction set.
    pub architecture: &'static str,
    /// Name of the processor.
    pub processor: String,
    /// Cores that compute on their own.
    pub cores: usize,
    /// Memory that this process can have at the most.
    pub memory_bytes: Option<u64>,
    /// Memory that is free or can be made free at once.
    pub available_bytes: Option<u64>,
}

/// The model.
#[derive(Debug, Serialize)]
pub struct Model {
    /// What it is called.
    pub name: String,
    /// Where it is, if it is here.
    pub path: Option<PathBuf>,
    /// Bytes that are read of its files.
    pub weight_bytes: u64,
    /// Context that it is to have.
    pub context: usize,
    /// How keys and values of it are stored.
    pub kv_cache_type: KvCacheType,
}

/// A backend, or one device of it.
#[derive(Debug, Serialize)]
pub struct Backend {
    /// As `--backend` calls it.
    pub name: &'static str,
    /// Whether it can run models at all.
    pub works: bool,
    /// What it is, or why it does not work.
    pub says: String,
    /// The room that it has for the model; `None` where it does not work, or not with such a KV cache.
    pub room: Option<Room>,
}

/// Memory against what the model needs.
#[derive(Debug, Serialize)]
pub struct Room {
    /// Whether the model runs from it at full speed.
    pub fits: bool,
    /// The figures.
    pub says: String,
    /// The longest context that does; `None` where none does.
    pub most_context: Option<usize>,
}

/// Where the model would be downloaded to.
#[derive(Debug, Serialize)]
pub struct Disk {
    /// The directory.
    pub dir: PathBuf,
    /// What its disk has free.
    pub free_bytes: u64,
    /// What the model takes.
    pub needed_bytes: u64,
}

/// Something that the system gives so much of.
#[derive(Debug, Serialize)]
pub struct Limit {
    /// What.
    pub name: &'static str,
    /// How much.
    pub value: String,
    /// How to raise it, where that helps.
    pub advice: Option<String>,
    /// Whether the model cannot run as it is.
    pub blocks: bool,
}

impl Report {
    /// What stands in the way.
    pub fn find_problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let rooms =
            || self.backends.iter().filter_map(|backend| Some((backend.name, backend.room.as_ref()?)));
        if !rooms().any(|(_, room)| room.fits) {
            problems.extend(rooms().map(|(name, room)| format!("memory ({name}): {}", room.says)));
        }
        if let Some(disk) = self.disk.as_ref().filter(|disk| disk.free_bytes < disk.needed_bytes) {
            problems.push(format!(
                "disk: {} has {} free and the model takes {}; free {} more",
                disk.dir.display(),
                gb(disk.free_bytes),
                gb(disk.needed_bytes),
                gb(disk.needed_bytes - disk.free_bytes)
            ));
        }
        let blocking = self.limits.iter().filter(|limit| limit.blocks);
        problems.extend(blocking.map(|limit| {
            format!("{} ({}): {}", limit.name, limit.value, limit.advice.as_deref().unwrap_or_default())
        }));
        problems
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { system, architecture, processor, cores, memory_bytes, available_bytes } = &self.machine;
        writeln!(f, "Lily {} on {system}, {architecture}", self.version)?;
        write!(f, "{processor}, {cores} cores")?;
        if let Some(bytes) = memory_bytes {
            write!(f, ", {} of memory", gb(*bytes))?;
        }
        if let Some(bytes) = available_bytes {
            write!(f, " ({} of it available now)", gb(*bytes))?;
        }
        writeln!(f, "\n\nBackends")?;
        for backend in &self.backends {
            line(f, backend.works, backend.name, &backend.says)?;
        }
        let Model { name, path, context, kv_cache_type, .. } = &self.model;
        writeln!(f, "      --backend auto takes {}: {}", self.taken, self.reason)?;
        let stored = match kv_cache_type {
            KvCacheType::F16 => "",
            KvCacheType::Q8 => ", keys and values in 8 bits",
        };
        let place = path.as_ref().map_or("not here yet".to_owned(), |path| path.display().to_string());
        writeln!(f, "\n{name} ({place}) with a context of {context}{stored}")?;
        for backend in &self.backends {
            let Some(room) = &backend.room else { continue };
            line(f, room.fits, &format!("on {}", backend.name), &room.says)?;
            if let Some(most) = room.most_context {
                writeln!(f, "      {:NAME_WIDTH$}the longest context that fits is {most}", "")?;
            }
        }
        if let Some(Disk { dir, free_bytes, needed_bytes }) = &self.disk {
            let says = format!("{} free in {}, {} needed", gb(*free_bytes), dir.display(), gb(*needed_bytes));
            line(f, free_bytes >= needed_bytes, "disk", &says)?;
        }

        writeln!(f, "\nLimits")?;
        for Limit { name, value, advice, blocks } in &self.limits {
            let advice = advice.as_ref().map_or(String::new(), |advice| format!("; {advice}"));
            line(f, !blocks, name, &format!("{value}{advice}"))?;
        }
        if !self.problems.is_empty() {
            writeln!(f, "\nIn the way")?;
            self.problems.iter().try_for_each(|problem| writeln!(f, "- {problem}"))?;
        }
        writeln!(f, "\nNext: {}", self.next)
    }
}

fn line(f: &mut fmt::Formatter<'_>, good: bool, name: &str, says: &str) -> fmt::Result {
    writeln!(f, "  {:4}{name:NAME_WIDTH$}{says}", if good { "yes" } else { "no" })
}

/// Bytes as this page says them.
pub fn gb(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / GB)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(fits: [bool; 2], free_bytes: u64, blocks: bool) -> Report {
        let room = |fits| Some(Room { fits, says: "figures".to_owned(), most_context: Some(4096) });
        let backend = |name, room| Backend { name, works: true, says: "there".to_owned(), room };
        let mut report = Report {
            version: "1",
            machine: Machine {
                system: "linux",
                architecture: "x86_64",
                processor: "a processor".to_owned(),
                cores: 2,
                memory_bytes: Some(24_000_000_000),
                available_bytes: None,
            },
            model: Model {
                name: "model".to_owned(),
                path: None,
                weight_bytes: 20,
                context: 4096,
                kv_cache_type: KvCacheType::F16,
            },
            backends: vec![backend("cpu", room(fits[0])), backend("cuda", room(fits[1]))],
            taken: "cpu",
            reason: "a reason".to_owned(),
            disk: Some(Disk { dir: "/models".into(), free_bytes, needed_bytes: 21_000_000_000 }),
            limits: vec![Limit {
                name: "address space",
                value: "1.0 GB".to_owned(),
                advice: Some("`ulimit -v unlimited`".to_owned()),
                blocks,
            }],
            problems: Vec::new(),
            next: "something".to_owned(),
        };
        report.problems = report.find_problems();
        report
    }

    #[test]
    fn one_device_with_room_is_enough() {
        assert_eq!(report([false, true], 1 << 40, false).problems, [""; 0]);
        assert_eq!(report([true, false], 1 << 40, false).problems, [""; 0]);
        assert_eq!(report([false, false], 1 << 40, false).problems.len(), 2);
    }

    #[test]
    fn everything_in_the_way_is_named_with_what_to_do() {
        let report = report([true, true], 16_000_000_000, true);
        assert_eq!(
            report.problems,
            [
                "disk: /models has 16.0 GB free and the model takes 21.0 GB; free 5.0 GB more",
                "address space (1.0 GB): `ulimit -v unlimited`"
            ]
        );
        let page = report.to_string();
        assert!(page.contains("\nIn the way\n- disk: /models"), "{page}");
        assert!(page.contains("  no  disk          16.0 GB free in /models, 21.0 GB needed\n"), "{page}");
        assert!(page.ends_with("\nNext: something\n"), "{page}");
    }
}
