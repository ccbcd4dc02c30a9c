//! The programs that a repository brings along for its boots.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use harvest_proto::{
    bridge::{Checkout, Exit},
    event::BootPhase,
    redact,
};

use super::{BootRunner, PhaseResult, failure::PhaseError};
use crate::{capture, install, sandbox::Sandbox, users::User};

/// A program of the repository.
struct Hook {
    title: String,
    argv: Vec<String>,
}

impl BootRunner {
    /// Runs a hook of each checkout that has it. A phase without hooks is never reported as
    /// started: a person would read that a script runs.
    pub(super) async fn run_hooks(
        &self,
        phase: BootPhase,
        checkouts: &[&Checkout],
        user: &User,
        hook: (&str, Duration),
    ) -> Result<(), ()> {
        let hooks: Vec<_> = checkouts
            .iter()
            .filter_map(|checkout| Some((*checkout, self.hook(checkout, hook.0)?)))
            .collect();
        if hooks.is_empty() {
            self.skip(phase);
            return Ok(());
        }
        self.run_phase(phase, run_hooks(&self.sandbox, hooks, user, (checkouts.len() == 1, hook.1)))
            .await
    }

    /// The hook of a checkout: the script, or else the command in the file.
    fn hook(&self, checkout: &Checkout, name: &str) -> Option<Hook> {
        let shell = if Path::new("/bin/bash").exists() { "bash" } else { "sh" };
        if hook_path(&self.sandbox, checkout, name).is_file() {
            let script = format!(".harvest/{name}");
            return Some(Hook { argv: vec![shell.to_owned(), script.clone()], title: script });
        }
        let command = self.config(checkout).setup.filter(|_| name == "setup.sh")?;
        let argv = vec![shell.to_owned(), "-c".to_owned(), command];
        Some(Hook { argv, title: format!("`setup` of {}", install::CONFIG_FILE) })
    }
}

async fn run_hooks(
    sandbox: &Sandbox,
    hooks: Vec<(&Checkout, Hook)>,
    user: &User,
    (is_only, timeout): (bool, Duration),
) -> PhaseResult {
    for (checkout, Hook { title, argv }) in hooks {
        let folder = format!("{}/{}", sandbox.workspace(), checkout.folder);
        let spec = sandbox.process_spec(argv, user, &folder);
        let captured = capture::run(sandbox, spec, timeout).await.map_err(|fault| {
            PhaseError::transient(format!("cannot run {title}")).with_tail(fault.message)
        })?;
        if captured.exit != Exit::Code(0) {
            let title = if is_only { title } else { format!("{}/{title}", checkout.folder) };
            let tail = redact::redact(&captured.tail);
            return Err(PhaseError::of_hook(&title, captured.exit).with_tail(tail));
        }
    }
    Ok(true)
}

pub(super) fn hook_path(sandbox: &Sandbox, checkout: &Checkout, name: &str) -> PathBuf {
    Path::new(&sandbox.workspace()).join(&*checkout.folder).join(".harvest").join(name)
}
