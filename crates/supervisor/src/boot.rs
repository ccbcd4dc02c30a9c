//! Gets the sandbox ready for its session: checkouts, hooks, agent. Each step is told as an event;
//! the first that fails ends the boot, and nothing is run twice.

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

const HOOK_LIMIT: Duration = Duration::from_secs(30 * 60);

/// Takes the orders and begins; the second time it only answers.
pub(crate) fn accept(supervisor: &Rc<Supervisor>, boot: Boot) -> Result<Reply, Fault> {
    check(&boot)?;
    if let Some(before) = &*supervisor.boot.borrow() {
        if (&before.session, before.epoch) == (&boot.session, boot.epoch) {
            return Ok(Reply::Done);
        }
        return Err(Fault::new(
            FaultCode::Invalid,
            format!("this sandbox is {}'s", before.session),
        ));
    }
    supervisor.boot.replace(Some(boot.clone()));
    let supervisor = Rc::clone(supervisor);
    tokio::task::spawn_local(async move {
        let _told_as_an_event = run(&supervisor, &boot).await;
    });
    Ok(Reply::Done)
}

// A name becomes a folder, a branch an argument of git: neither may be taken for something else.
fn check(boot: &Boot) -> Result<(), Fault> {
    let invalid =
        |what: &str, text: &str| Fault::new(FaultCode::Invalid, format!("`{text}` is not {what}"));
    for checkout in &boot.repositories {
        let name = checkout.name.as_str();
        if name.is_empty() || name.starts_with(['.', '-']) || name.contains(['/', '\0']) {
            return Err(invalid("the name of a checkout", name));
        }
        for branch in checkout.base.iter().chain(&checkout.branch) {
            if branch.is_empty()
                || branch.starts_with('-')
                || branch.contains(['\0', ' ', '~', '^', ':', '\\'])
            {
                return Err(invalid("the name of a branch", branch));
            }
        }
        if checkout.remote.is_empty() || checkout.remote.starts_with('-') {
            return Err(invalid("a remote", &checkout.remote));
        }
    }
    Ok(())
}

/// What a step gave: whether there was anything to do, or the last lines of what failed.
type Step = Result<bool, String>;

async fn run(supervisor: &Rc<Supervisor>, boot: &Boot) -> Result<(), ()> {
    let user = supervisor.user(Some(AGENT_USER)).map_err(|_| ())?;
    let building = boot.start == BootStart::Build;
    // What a disk holds already has been set up there.
    let mut fresh: Vec<&Checkout> = match boot.start {
        BootStart::Build | BootStart::Fresh => boot.repositories.iter().collect(),
        BootStart::Image | BootStart::Restore => Vec::new(),
    };
    let limit = boot.hook_millis.map_or(HOOK_LIMIT, Duration::from_millis);
    let started: Vec<&Checkout> = boot.repositories.iter().filter(|_| !building).collect();
    step(supervisor, BootPhase::Starting, starting(supervisor, &user)).await?;
    step(supervisor, BootPhase::Sync, sync(supervisor, boot, &user, &mut fresh)).await?;
    step(supervisor, BootPhase::Setup, hooks(supervisor, &fresh, &user, ("setup.sh", limit)))
        .await?;
    step(supervisor, BootPhase::Start, hooks(supervisor, &started, &user, ("start.sh", limit)))
        .await?;
    step(supervisor, BootPhase::Agent, async {
        let Some(agent) = boot.agent.as_ref().filter(|_| !building) else { return Ok(false) };
        supervisor.turns.start(supervisor, agent, primary(supervisor, boot)).await.map(|()| true)
    })
    .await?;
    supervisor.phase(BootPhase::Ready, PhaseStatus::Done, Some(0), None);
    Ok(())
}

async fn step(
    supervisor: &Supervisor,
    phase: BootPhase,
    work: impl Future<Output = Step>,
) -> Result<(), ()> {
    let began = Instant::now();
    supervisor.phase(phase, PhaseStatus::Started, None, None);
    let done = work.await;
    let millis = u64::try_from(began.elapsed().as_millis()).ok();
    match done {
        Ok(true) => supervisor.phase(phase, PhaseStatus::Done, millis, None),
        Ok(false) => supervisor.phase(phase, PhaseStatus::Skipped, millis, None),
        Err(tail) => {
            supervisor.phase(phase, PhaseStatus::Failed, millis, Some(tail));
            return Err(());
        }
    }
    Ok(())
}

// The agent's home and the workspace belong to the agent's user, whatever the image says.
async fn starting(supervisor: &Supervisor, user: &User) -> Step {
    let home = supervisor.env(user).remove("HOME").unwrap_or_else(|| user.home.clone());
    for folder in [home, supervisor.workspace()] {
        own(Path::new(&folder), user)
            .map_err(|error| format!("cannot prepare {folder}: {error}"))?;
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
) -> Step {
    let git = Git { supervisor, user };
    let settled = git.settings().await;
    if boot.repositories.is_empty() {
        // An image without git is as good as any for work that needs none.
        return Ok(false);
    }
    settled?;
    for checkout in &boot.repositories {
        let told = match git.sync(checkout, boot.start).await? {
            Synced::Brought => None,
            Synced::Stale(message) => Some(message),
            Synced::Cloned => {
                if !fresh.contains(&checkout) {
                    fresh.push(checkout);
                }
                let restored = boot.start == BootStart::Restore;
                restored.then(|| format!("the disk held no {}: it was cloned", checkout.name))
            }
        };
        if let Some(message) = told {
            supervisor.outbox.push(None, EventBody::Warning { message });
        }
    }
    Ok(true)
}

async fn hooks(
    supervisor: &Supervisor,
    checkouts: &[&Checkout],
    user: &User,
    (name, limit): (&str, Duration),
) -> Step {
    let mut ran = false;
    for checkout in checkouts {
        let folder = format!("{}/{}", supervisor.workspace(), checkout.name);
        let script = format!(".harvest/{name}");
        if !Path::new(&folder).join(&script).is_file() {
            continue;
        }
        ran = true;
        let shell = if Path::new("/bin/bash").exists() { "bash" } else { "sh" };
        let order = supervisor.order(vec![shell.to_owned(), script.clone()], user, &folder);
        let captured =
            capture::run(supervisor, order, limit).await.map_err(|fault| fault.message)?;
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
    fn names_that_lead_elsewhere_are_refused() {
        assert!(check(&boot("shop", "harvest/x")).is_ok());
        for name in ["", "..", ".git", "a/b", "-x"] {
            assert!(check(&boot(name, "main")).is_err(), "{name}");
        }
        for branch in ["", "-f", "a b", "a:b"] {
            assert!(check(&boot("shop", branch)).is_err(), "{branch}");
        }
    }
}
