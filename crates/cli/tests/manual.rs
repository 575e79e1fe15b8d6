//! Completions and manual pages say what the programs take.

#[path = "support/process.rs"]
mod process;

use std::process::{Command, Stdio};

use process::{lily, run, text};

#[test]
fn completions_of_every_shell_know_commands_and_flags() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = text(&run(&mut lily(&["completions", shell])).stdout);
        for word in ["pull", "doctor", "model-path", "cache-dir"] {
            assert!(script.contains(word), "{word} for {shell}");
        }
        let script = text(&run(&mut lily(&["completions", shell, "--program", "lily-server"])).stdout);
        assert!(script.contains("lily-server") && script.contains("api-key"), "{shell}");
    }
}

#[cfg(unix)]
#[test]
fn bash_completes_a_command_and_a_flag() {
    let script = text(&run(&mut lily(&["completions", "bash"])).stdout);
    let complete = |words: &str| {
        let count = words.split(' ').count() - 1;
        let lines = format!(
            "{script}\nCOMP_WORDS=({words}); COMP_CWORD={count}; _lily lily \"${{COMP_WORDS[{count}]}}\" \
             \"${{COMP_WORDS[{}]}}\"; echo \"${{COMPREPLY[@]}}\"",
            count - 1
        );
        let output = run(Command::new("bash").args(["-c", &lines]).stdin(Stdio::null()));
        text(&output.stdout).trim().to_owned()
    };
    assert_eq!(complete("lily doc"), "doctor");
    assert_eq!(complete("lily pull --ret"), "--retries");
}

#[test]
fn every_command_has_a_page() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("man1");
    let output = run(&mut lily(&["man", dir.to_str().unwrap()]));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(page("lily.1").contains("doctor"));
    assert!(page("lily-pull.1").contains("HF_HOME"));
    assert!(page("lily-doctor.1").contains("Exit code"));
    assert!(page("lily-server.1").contains("api\\-key"));
}
