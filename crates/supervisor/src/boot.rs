//! Prepares the sandbox for its session: checkouts, hooks, agent. Each phase is reported as an
//! event; the first failure ends the boot. A boot runs once.

use std::{
    future::Future,
    os::unix::fs::{MetadataExt, chown},
    path::Path,
    rc::Rc,
    time::{Duration, Instant},
};

use harvest_proto::{
    EventBody,
    bridge::{Boot, BootStart, Checkout, Fault, FaultCode, Reply},
    event::{BootPhase, PhaseStatus},
};

use crate::{
    capture,
    git::{Git, Synced},
    supervisor::Supervisor,
    users::{AGENT_USER, User},
};

const DEFAULT_HOOK_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Starts the boot; a repeated request only gets a reply.
pub(crate) fn accept(supervisor: &Rc<Supervisor>, boot: Boot) -> Result<Reply, Fault> {
    check(&boot)?;
    if let Some(before) = &*supervisor.boot.borrow() {
        if (&before.session, before.epoch) == (&boot.session, boot.epoch) {
            return Ok(Reply::Done);
        }
        return Err(Fault::new(
            FaultCode::Invalid,
            format!("this sandbox belongs to session {}", before.session),
        ));
    }
    supervisor.boot.replace(Some(boot.clone()));
    let supervisor = Rc::clone(supervisor);
    tokio::task::spawn_local(async move {
        let _reported_as_event = run(&supervisor, &boot).await;
    });
    Ok(Reply::Done)
}

// Names become folders and branches become git arguments: reject those with another meaning.
fn check(boot: &Boot) -> Result<(), Fault> {
    let invalid = |what: &str, text: &str| {
        Fault::new(FaultCode::Invalid, format!("`{text}` is not a valid {what}"))
    };
    for checkout in &boot.repositories {
        let name = checkout.name.as_str();
        if name.is_empty() || name.starts_with(['.', '-']) || name.contains(['/', '\0']) {
            return Err(invalid("checkout name", name));
        }
        for branch in checkout.base.iter().chain(&checkout.branch) {
            if branch.is_empty()
                || branch.starts_with('-')
                || branch.contains(['\0', ' ', '~', '^', ':', '\\'])
            {
                return Err(invalid("branch name", branch));
            }
        }
        if checkout.remote.is_empty() || checkout.remote.starts_with('-') {
            return Err(invalid("remote", &checkout.remote));
        }
    }
    Ok(())
}

/// Whether there was anything to do, or the last lines of the failed command.
type PhaseResult = Result<bool, String>;

async fn run(supervisor: &Rc<Supervisor>, boot: &Boot) -> Result<(), ()> {
    let user = supervisor.user(Some(AGENT_USER)).map_err(|_| ())?;
    let building = boot.start == BootStart::Build;
    // Checkouts that need their setup hook; those on an existing disk have been set up.
    let mut fresh: Vec<&Checkout> = match boot.start {
        BootStart::Build | BootStart::Fresh => boot.repositories.iter().collect(),
        BootStart::Image | BootStart::Restore => Vec::new(),
    };
    let timeout = boot.hook_millis.map_or(DEFAULT_HOOK_TIMEOUT, Duration::from_millis);
    let started: Vec<&Checkout> = boot.repositories.iter().filter(|_| !building).collect();
    run_phase(supervisor, BootPhase::Starting, starting(supervisor, &user)).await?;
    run_phase(supervisor, BootPhase::Sync, sync(supervisor, boot, &user, &mut fresh)).await?;
    run_phase(
        supervisor,
        BootPhase::Setup,
        hooks(supervisor, &fresh, &user, ("setup.sh", timeout)),
    )
    .await?;
    run_phase(
        supervisor,
        BootPhase::Start,
        hooks(supervisor, &started, &user, ("start.sh", timeout)),
    )
    .await?;
    run_phase(supervisor, BootPhase::Agent, async {
        let Some(agent) = boot.agent.as_ref().filter(|_| !building) else { return Ok(false) };
        supervisor.turns.start(supervisor, agent, primary(supervisor, boot)).await.map(|()| true)
    })
    .await?;
    supervisor.report_phase(BootPhase::Ready, PhaseStatus::Done, Some(0), None);
    Ok(())
}

async fn run_phase(
    supervisor: &Supervisor,
    phase: BootPhase,
    work: impl Future<Output = PhaseResult>,
) -> Result<(), ()> {
    let started_at = Instant::now();
    supervisor.report_phase(phase, PhaseStatus::Started, None, None);
    let done = work.await;
    let millis = u64::try_from(started_at.elapsed().as_millis()).ok();
    match done {
        Ok(true) => supervisor.report_phase(phase, PhaseStatus::Done, millis, None),
        Ok(false) => supervisor.report_phase(phase, PhaseStatus::Skipped, millis, None),
        Err(tail) => {
            supervisor.report_phase(phase, PhaseStatus::Failed, millis, Some(tail));
            return Err(());
        }
    }
    Ok(())
}

// Gives the agent's home and the workspace to the agent's user, regardless of the image.
async fn starting(supervisor: &Supervisor, user: &User) -> PhaseResult {
    let home = supervisor.env(user).remove("HOME").unwrap_or_else(|| user.home.clone());
    for folder in [home, supervisor.workspace()] {
        own(Path::new(&folder), user)
            .map_err(|error| format!("cannot create {folder}: {error}"))?;
    }
    Ok(true)
}

fn own(folder: &Path, user: &User) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    if std::fs::metadata(folder)?.uid() != user.uid {
        chown(folder, Some(user.uid), Some(user.gid))?;
    }
    Ok(())
}

async fn sync<'a>(
    supervisor: &Supervisor,
    boot: &'a Boot,
    user: &User,
    fresh: &mut Vec<&'a Checkout>,
) -> PhaseResult {
    let git = Git { supervisor, user };
    let configured = git.configure().await;
    if boot.repositories.is_empty() {
        // Without repositories the image need not contain git.
        return Ok(false);
    }
    configured?;
    for checkout in &boot.repositories {
        let warning = match git.sync(checkout, boot.start).await? {
            Synced::UpToDate => None,
            Synced::Stale(message) => Some(message),
            Synced::Cloned => {
                if !fresh.contains(&checkout) {
                    fresh.push(checkout);
                }
                let restored = boot.start == BootStart::Restore;
                restored.then(|| {
                    format!(
                        "{} was missing on the restored disk and has been cloned",
                        checkout.name
                    )
                })
            }
        };
        if let Some(message) = warning {
            supervisor.outbox.push(None, EventBody::Warning { message });
        }
    }
    Ok(true)
}

async fn hooks(
    supervisor: &Supervisor,
    checkouts: &[&Checkout],
    user: &User,
    (name, timeout): (&str, Duration),
) -> PhaseResult {
    let mut ran = false;
    for checkout in checkouts {
        let folder = format!("{}/{}", supervisor.workspace(), checkout.name);
        let script = format!(".harvest/{name}");
        if !Path::new(&folder).join(&script).is_file() {
            continue;
        }
        ran = true;
        let shell = if Path::new("/bin/bash").exists() { "bash" } else { "sh" };
        let spec = supervisor.process_spec(vec![shell.to_owned(), script.clone()], user, &folder);
        let captured =
            capture::run(supervisor, spec, timeout).await.map_err(|fault| fault.message)?;
        captured.ok().map_err(|tail| format!("{}: {script}\n{tail}", checkout.name))?;
    }
    Ok(ran)
}

fn primary(supervisor: &Supervisor, boot: &Boot) -> String {
    let workspace = supervisor.workspace();
    boot.repositories
        .first()
        .map_or(workspace.clone(), |first| format!("{workspace}/{}", first.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::SessionId;

    fn boot(name: &str, branch: &str) -> Boot {
        let checkout = Checkout {
            name: name.into(),
            remote: "http://git.harvest.internal/x".into(),
            base: None,
            branch: Some(branch.into()),
            clone_missing: false,
        };
        Boot {
            session: SessionId::random(),
            epoch: 1,
            start: BootStart::Fresh,
            repositories: vec![checkout],
            agent: None,
            env: Default::default(),
            hook_millis: None,
        }
    }

    #[test]
    fn unsafe_names_are_rejected() {
        assert!(check(&boot("shop", "harvest/x")).is_ok());
        for name in ["", "..", ".git", "a/b", "-x"] {
            assert!(check(&boot(name, "main")).is_err(), "{name}");
        }
        for branch in ["", "-f", "a b", "a:b"] {
            assert!(check(&boot("shop", branch)).is_err(), "{branch}");
        }
    }
}
