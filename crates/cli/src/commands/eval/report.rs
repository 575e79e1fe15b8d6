//! The figures, as `--json` prints them, and the table. Divergences are in nats.

use std::fmt;
use std::path::Path;

use serde::Serialize;

use super::score::Row;

/// Positions of a window are reported in groups that double: 0, 1, 2-3, 4-7, …
fn group(index: usize) -> u32 {
    usize::BITS - index.leading_zeros()
}

/// Everything that was scored.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of the program.
    pub lily: &'static str,
    /// The checkpoint's name.
    pub model: String,
    /// What was scored.
    pub subject: String,
    /// What it was compared with.
    pub reference: Option<String>,
    /// The file of the text.
    pub text: String,
    /// All positions.
    pub all: Totals,
    /// Those before a token that the model was trained to write, where the text says which.
    pub answers: Option<Totals>,
    /// By how many tokens of context there were.
    pub by_context: Vec<Group>,
    /// Each position.
    pub positions: Vec<Position>,
}

/// Figures over some positions.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Totals {
    /// How many.
    pub positions: usize,
    /// The exponential of the mean negative log-probability.
    pub perplexity: f64,
    /// Beside the reference.
    pub compared: Option<Compared>,
}

/// Figures beside those of a reference.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Compared {
    /// The reference's perplexity.
    pub perplexity: f64,
    /// By how much the subject's is higher, in percent.
    pub perplexity_change_percent: f64,
    /// Share of positions with the same likeliest token, in percent.
    pub same_top_percent: f64,
    /// Divergence of the subject's distributions; `None` where the reference has no distributions.
    pub divergence: Option<Divergence>,
}

/// Divergences over some positions.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Divergence {
    /// Their mean.
    pub mean: f64,
    /// 99 of 100 are no larger.
    pub percentile_99: f64,
    /// The largest.
    pub largest: f64,
}

/// Positions with about as much context.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Group {
    /// Tokens of context before the first of them, itself included.
    pub context: usize,
    /// Their figures.
    pub totals: Totals,
}

/// One position.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Position {
    /// Its place in the window, from 0.
    pub index: usize,
    /// Whether the model was trained to write what follows.
    pub answer: Option<bool>,
    /// What the subject says.
    pub subject: Row,
    /// What the reference says.
    pub reference: Option<Row>,
    /// How far the subject's distribution is from the reference's.
    pub divergence: Option<f64>,
}

impl Report {
    /// The figures of `positions`, at least one.
    pub fn new(
        model: &str,
        subject: String,
        reference: Option<String>,
        text: &Path,
        positions: Vec<Position>,
    ) -> Report {
        let groups = positions.iter().map(|position| group(position.index)).max().unwrap_or(0);
        let by_context = (0..=groups).filter_map(|number| {
            let totals = Totals::of(positions.iter().filter(|position| group(position.index) == number))?;
            Some(Group { context: (1 << number) / 2 + 1, totals })
        });
        let none = Totals { positions: 0, perplexity: f64::NAN, compared: None };
        Report {
            lily: env!("CARGO_PKG_VERSION"),
            model: model.to_owned(),
            subject,
            reference,
            text: text.display().to_string(),
            all: Totals::of(positions.iter()).unwrap_or(none),
            answers: Totals::of(positions.iter().filter(|position| position.answer == Some(true))),
            by_context: by_context.collect(),
            positions,
        }
    }
}

impl Totals {
    /// `None` where there are no positions.
    fn of<'a>(positions: impl Iterator<Item = &'a Position> + Clone) -> Option<Totals> {
        let count = positions.clone().count();
        if count == 0 {
            return None;
        }
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / count as f64;
        let perplexity = (-mean(&mut positions.clone().map(|position| position.subject.logprob))).exp();
        let references: Option<Vec<Row>> = positions.clone().map(|position| position.reference).collect();
        let compared = references.map(|references| {
            let theirs = (-mean(&mut references.iter().map(|row| row.logprob))).exp();
            let same = positions
                .clone()
                .zip(&references)
                .filter(|(position, row)| position.subject.best == row.best);
            let divergences: Option<Vec<f64>> =
                positions.clone().map(|position| position.divergence).collect();
            Compared {
                perplexity: theirs,
                perplexity_change_percent: 100.0 * (perplexity / theirs - 1.0),
                same_top_percent: 100.0 * same.count() as f64 / count as f64,
                divergence: divergences.map(Divergence::of),
            }
        });
        Some(Totals { positions: count, perplexity, compared })
    }
}

impl Divergence {
    fn of(mut values: Vec<f64>) -> Divergence {
        values.sort_by(f64::total_cmp);
        let count = values.len();
        Divergence {
            mean: values.iter().sum::<f64>() / count as f64,
            percentile_99: values[(count * 99).div_ceil(100) - 1],
            largest: values[count - 1],
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} on {}, {}", self.model, self.subject, self.text)?;
        if let Some(reference) = &self.reference {
            writeln!(f, "against {reference}")?;
        }
        write!(f, "\n{:<16}{:>10}{:>14}", "", "positions", "perplexity")?;
        if self.reference.is_some() {
            write!(f, "{:>14}{:>12}{:>12}", "reference", "change", "same top")?;
        }
        let has_divergence = self.all.compared.is_some_and(|compared| compared.divergence.is_some());
        if has_divergence {
            write!(f, "{:>12}{:>12}{:>12}", "KL mean", "KL 99 %", "KL largest")?;
        }
        writeln!(f)?;
        line(f, "all", &self.all)?;
        if let Some(answers) = &self.answers {
            line(f, "answers", answers)?;
        }
        for (number, group) in self.by_context.iter().enumerate() {
            let to = self
                .by_context
                .get(number + 1)
                .map_or("on".to_owned(), |next| (next.context - 1).to_string());
            line(f, &format!("context {}-{to}", group.context), &group.totals)?;
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, totals: &Totals) -> fmt::Result {
    write!(f, "{name:<16}{:>10}{:>14.5}", totals.positions, totals.perplexity)?;
    if let Some(compared) = &totals.compared {
        write!(
            f,
            "{:>14.5}{:>+10.3} %{:>10.2} %",
            compared.perplexity, compared.perplexity_change_percent, compared.same_top_percent
        )?;
        if let Some(Divergence { mean, percentile_99, largest }) = compared.divergence {
            write!(f, "{mean:>12.2e}{percentile_99:>12.2e}{largest:>12.2e}")?;
        }
    }
    writeln!(f)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(index: usize, logprob: f64, best: u32, reference: Option<(f64, u32)>) -> Position {
        Position {
            index,
            answer: Some(index > 1),
            subject: Row { logprob, best },
            reference: reference.map(|(logprob, best)| Row { logprob, best }),
            divergence: reference.map(|_| index as f64),
        }
    }

    #[test]
    fn totals_are_those_of_their_positions() {
        let half = 0.5f64.ln();
        let positions = vec![
            position(0, half, 1, Some((half, 1))),
            position(1, 2.0 * half, 1, Some((half, 2))),
            position(2, 3.0 * half, 1, Some((half, 1))),
            position(3, 2.0 * half, 1, Some((half, 1))),
        ];
        let report = Report::new("m", "s".into(), Some("r".into()), Path::new("t"), positions);
        assert!((report.all.perplexity - 4.0).abs() < 1e-9);
        let compared = report.all.compared.unwrap();
        assert!((compared.perplexity - 2.0).abs() < 1e-9);
        assert!((compared.perplexity_change_percent - 100.0).abs() < 1e-9);
        assert_eq!(compared.same_top_percent, 75.0);
        let divergence = compared.divergence.unwrap();
        assert_eq!((divergence.mean, divergence.percentile_99, divergence.largest), (1.5, 3.0, 3.0));
        assert_eq!(report.answers.unwrap().positions, 2);
        let contexts: Vec<_> =
            report.by_context.iter().map(|group| (group.context, group.totals.positions)).collect();
        assert_eq!(contexts, [(1, 1), (2, 1), (3, 2)]);
    }

    #[test]
    fn without_a_reference_there_is_perplexity_alone() {
        let report = Report::new("m", "s".into(), None, Path::new("t"), vec![position(0, 0.0, 1, None)]);
        assert_eq!((report.all.perplexity, report.all.compared.is_none()), (1.0, true));
        assert!(!report.to_string().contains("KL"));
    }
}
