//! What is in a checkpoint's directory and what Lily would refuse of it: the report of `lily inspect`.
//!
//! Where opening a checkpoint stops at the first file that is wrong, this looks at all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use crate::checkpoint::{self, CONFIG_FILE};
use crate::config::{ModelConfig, parse_config_text};
use crate::error::ModelError;
use crate::geometry::{Geometry, LayerKind};
use crate::load;
use crate::names::{self, Skipped};
use crate::safetensors::{Dtype, Tensors};
use crate::source::Source;

/// Tensors of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// How many.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Their formats: `4-bit` and `8-bit` for packed elements, else the stored type.
    pub formats: BTreeSet<String>,
}

/// The contents of a directory.
#[derive(Debug)]
pub struct Report {
    /// The directory.
    pub place: String,
    /// What `config.json` says, where Lily can run it.
    pub config: Option<ModelConfig>,
    /// Tensors by what they are for.
    pub groups: BTreeMap<&'static str, Group>,
    /// Tensors that are left in the file, with the part of the model they belong to.
    pub skipped: Vec<(String, Skipped)>,
    /// Tensors that the architecture does not have.
    pub unknown: Vec<String>,
    /// Bytes that the engine reads of the files; 0 where the config or the files are refused.
    pub used_bytes: u64,
    /// One sentence for each thing that would be refused; empty where the checkpoint runs.
    pub problems: Vec<String>,
}

impl Report {
    /// Bytes of all tensors in the files.
    pub fn total_bytes(&self) -> u64 {
        self.groups.values().map(|g| g.bytes).sum()
    }
}

/// Looks at everything in the directory `dir`.
///
/// # Errors
/// [`ModelError`] only where there is no such directory; what is wrong in it goes into the report.
pub fn report(dir: &Path) -> Result<Report, ModelError> {
    Ok(report_source(&Source::directory(dir)?))
}

/// Looks at everything in `source`.
pub fn report_source(source: &Source) -> Report {
    let mut problems = Vec::new();
    let config = keep(source.require(CONFIG_FILE).and_then(|json| parse_config_text(&json)), &mut problems);
    let tensors = keep(Tensors::open(source), &mut problems);
    let mut report = Report {
        place: source.place(),
        groups: tensors.as_ref().map(|t| groups(t, config.as_ref())).unwrap_or_default(),
        config,
        skipped: Vec::new(),
        unknown: Vec::new(),
        used_bytes: 0,
        problems: Vec::new(),
    };
    if let (Some(config), Some(tensors)) = (&report.config, &tensors) {
        let (loaded, weights) = load::load(config, tensors);
        keep(weights, &mut problems);
        report.skipped = loaded.skipped;
        report.unknown = loaded.unknown;
        report.used_bytes = loaded.used_bytes;
    }
    let vocab = report.config.as_ref().map(|c| c.geometry.vocab);
    keep(checkpoint::read_tokenizer(source, vocab), &mut problems);
    keep(checkpoint::read_chat_template(source), &mut problems);
    keep(checkpoint::read_generation_config(source), &mut problems);
    report.problems = problems;
    report
}

/// The value, or `None` after noting each thing that is wrong.
fn keep<T>(result: Result<T, ModelError>, problems: &mut Vec<String>) -> Option<T> {
    match result {
        Ok(value) => return Some(value),
        Err(ModelError::Refused(refusals)) => problems.extend(refusals.iter().map(ToString::to_string)),
        Err(other) => problems.push(other.to_string()),
    }
    None
}

fn groups(tensors: &Tensors, config: Option<&ModelConfig>) -> BTreeMap<&'static str, Group> {
    let mut groups: BTreeMap<&'static str, Group> = BTreeMap::new();
    for (name, tensor) in tensors.iter() {
        let group = groups.entry(kind(name)).or_default();
        group.tensors += 1;
        group.bytes += tensor.data.len() as u64;
        let canonical = names::canonical(name);
        // Scales and biases belong to the packed elements, whose format stands for all three.
        if canonical.ends_with(".scales") || canonical.ends_with(".biases") {
            continue;
        }
        let module = canonical.trim_end_matches(".weight");
        let declared = config.and_then(|c| c.quantization.of(module));
        group.formats.insert(match declared {
            Some(format) if tensor.dtype == Dtype::U32 => format.to_string(),
            _ => tensor.dtype.to_string(),
        });
    }
    groups
}

/// What the tensor `name` is for.
fn kind(name: &str) -> &'static str {
    match names::skipped(name) {
        Some(Skipped::Vision) => return "vision (skipped)",
        Some(Skipped::Mtp) => return "multi-token prediction (skipped)",
        None => {}
    }
    let name = names::canonical(name);
    let parts: Vec<&str> = name.split('.').collect();
    match parts[..] {
        ["model", "embed_tokens", ..] => "embedding",
        ["lm_head", ..] => "head",
        ["model", "norm", ..] => "norms",
        ["model", "layers", _, part, ..] if part.ends_with("layernorm") => "norms",
        ["model", "layers", _, "linear_attn", ..] => "Gated DeltaNet",
        ["model", "layers", _, "self_attn", ..] => "attention",
        ["model", "layers", _, "mlp", "switch_mlp" | "experts", ..] => "routed experts",
        ["model", "layers", _, "mlp", "shared_expert", ..] => "shared expert",
        ["model", "layers", _, "mlp", ..] => "routers",
        _ => "unknown",
    }
}

/// Names that the printed report lists of the skipped and of the unknown tensors.
const SHOWN_NAMES: usize = 5;
const GIB: f64 = (1u64 << 30) as f64;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.place)?;
        if let Some(config) = &self.config {
            write_geometry(f, &config.model_type, &config.geometry)?;
        }
        if !self.groups.is_empty() {
            writeln!(f, "\n{:<34}{:>8}{:>17}  format", "tensors", "count", "bytes")?;
        }
        for (name, group) in &self.groups {
            let formats: Vec<&str> = group.formats.iter().map(String::as_str).collect();
            writeln!(f, "{name:<34}{:>8}{:>17}  {}", group.tensors, group.bytes, formats.join(", "))?;
        }
        let total = self.total_bytes();
        writeln!(f, "{:<34}{:>8}{total:>17}  {:.2} GiB", "all", "", total as f64 / GIB)?;
        if self.used_bytes > 0 {
            let used = self.used_bytes;
            writeln!(f, "{:<34}{:>8}{used:>17}  {:.2} GiB", "read by Lily", "", used as f64 / GIB)?;
        }
        let skipped: Vec<&str> = self.skipped.iter().map(|(name, _)| name.as_str()).collect();
        write_names(f, "skipped, as Lily reads text only", &skipped)?;
        let unknown: Vec<&str> = self.unknown.iter().map(String::as_str).collect();
        write_names(f, "warning: not part of this architecture, ignored", &unknown)?;
        if self.problems.is_empty() {
            return writeln!(f, "\nLily runs this checkpoint.");
        }
        writeln!(f, "\nLily refuses this checkpoint:")?;
        self.problems.iter().try_for_each(|problem| writeln!(f, "- {problem}"))
    }
}

fn write_geometry(f: &mut fmt::Formatter<'_>, model_type: &str, g: &Geometry) -> fmt::Result {
    let (a, d, m) = (&g.attention, &g.delta, &g.moe);
    let head = if g.tied_head { "tied head" } else { "untied head" };
    writeln!(
        f,
        "{model_type}: hidden {}, vocabulary {}, {head}, context {}",
        g.hidden, g.vocab, g.max_context
    )?;
    writeln!(
        f,
        "{} layers: {} Gated DeltaNet, {} full attention",
        g.layers.len(),
        g.count(LayerKind::Delta),
        g.count(LayerKind::Attention)
    )?;
    writeln!(
        f,
        "attention: {} query and {} KV heads of {}, rotary on {} (base {})",
        a.heads, a.kv_heads, a.head_dim, a.rotary_dim, a.rope_theta
    )?;
    writeln!(
        f,
        "Gated DeltaNet: {} key heads of {}, {} value heads of {}, convolution of {}",
        d.key_heads, d.key_dim, d.value_heads, d.value_dim, d.conv_width
    )?;
    writeln!(
        f,
        "experts: top {} of {}, width {}; shared width {}",
        m.top_k, m.experts, m.expert_width, m.shared_width
    )
}

fn write_names(f: &mut fmt::Formatter<'_>, title: &str, names: &[&str]) -> fmt::Result {
    if names.is_empty() {
        return Ok(());
    }
    let shown = names[..names.len().min(SHOWN_NAMES)].join(", ");
    let more = match names.len().saturating_sub(SHOWN_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    writeln!(f, "{title}: {shown}{more}")
}
