//! A plan as a graph in Graphviz' language.

use std::fmt;

use crate::plan::Plan;

/// Prints a plan for `dot`: one node a dispatch, one edge a direct dependency, the longest chain in bold.
pub struct Dot<'a>(pub &'a Plan);

impl fmt::Display for Dot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { dispatches, dependencies, .. } = self.0;
        let chain = dependencies.longest_chain();
        writeln!(f, "digraph plan {{")?;
        writeln!(f, "  node [shape=box, fontname=\"monospace\"];")?;
        for (index, dispatch) in dispatches.iter().enumerate() {
            let layer = dispatch.layer.map_or(String::new(), |layer| format!(" {layer}"));
            let [x, y, z] = dispatch.grid;
            let style = if chain.binary_search(&index).is_ok() { ", style=bold" } else { "" };
            writeln!(
                f,
                "  n{index} [label=\"{}{layer}\\n{x}x{y}x{z} of {}\"{style}];",
                dispatch.kernel, dispatch.threads
            )?;
        }
        for (index, earlier) in dependencies.waits_for.iter().enumerate() {
            for before in earlier {
                writeln!(f, "  n{before} -> n{index};")?;
            }
        }
        writeln!(f, "}}")
    }
}
