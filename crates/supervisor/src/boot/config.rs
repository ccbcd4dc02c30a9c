//! `.harvest/config.toml` at a boot, see `docs/decisions/0037-repository-config.md`. The file of a
//! checkout is read as its base commit has it, before anything of the repository runs, and kept on
//! the disk for later boots.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use harvest_proto::{
    EventBody,
    api::RepositoryConfig,
    bridge::{Boot, Checkout},
};

use super::{BootRunner, failure::PhaseError};
use crate::{
    files,
    git::checks::read_config,
    install::{CONFIG_FILE, MAX_CONFIG_BYTES},
    sandbox::Sandbox,
    users::User,
};

/// Below the agent's home. The agent may change what it finds here: it gives no rights.
const KEPT: &str = ".local/state/harvest/repositories";

impl BootRunner {
    /// Applies what the disk has of the repositories' files from an earlier boot.
    pub(super) fn apply_kept(&self, boot: &Boot, user: &User) {
        for checkout in &boot.repositories {
            let text = files::read_small(&kept(&self.sandbox, checkout, user, "json"), user);
            let text = text.ok().flatten().filter(|text| text.len() <= 4 * MAX_CONFIG_BYTES);
            let config = text.and_then(|text| serde_json::from_str(&text).ok());
            let RepositoryConfig { env, setup, .. } = config.unwrap_or_default();
            self.apply_env(env);
            // No packages: root would install what the agent wrote here.
            let config = RepositoryConfig { setup, ..RepositoryConfig::default() };
            self.configs.borrow_mut().insert(checkout.folder.clone(), config);
        }
    }

    /// Reads the files of checkouts that were just brought to their base commit. A broken one fails
    /// a build; a session goes on without it.
    pub(super) fn read_configs(
        &self,
        checkouts: &[&Checkout],
        user: &User,
        building: bool,
    ) -> Result<(), PhaseError> {
        for checkout in checkouts {
            let folder = Path::new(&self.sandbox.workspace()).join(&*checkout.folder);
            let config = match read_config(&folder, user) {
                Ok(Some(config)) => config,
                Ok(None) => continue,
                Err(why) if building => {
                    return Err(PhaseError::of_config(&checkout.name).with_tail(why));
                }
                Err(why) => {
                    let name = &checkout.name;
                    let message = format!("{CONFIG_FILE} of {name} is not used: {why}");
                    self.outbox.push(None, EventBody::Warning { message });
                    continue;
                }
            };
            if let Err(error) = keep(&self.sandbox, checkout, user, &config) {
                let message = format!("cannot keep the settings of {}: {error}", checkout.name);
                self.outbox.push(None, EventBody::Warning { message });
            }
            let RepositoryConfig { image, policy, budget_micros: budget, .. } = &config;
            if !building && (image.is_some() || policy.network.is_some() || budget.is_some()) {
                let name = &checkout.name;
                let message = format!(
                    "`image`, `policy` and `budget` in {CONFIG_FILE} apply to sessions that start \
                     from a build: `harvest repo build {name}`"
                );
                self.outbox.push(None, EventBody::Warning { message });
            }
            self.apply_env(config.env.clone());
            self.configs.borrow_mut().insert(checkout.folder.clone(), config.clone());
            let (repository, config) = (checkout.name.clone(), Box::new(config));
            self.outbox.push(None, EventBody::RepositoryConfig { repository, config });
        }
        Ok(())
    }

    /// What was read of a checkout in this boot.
    pub(super) fn config(&self, checkout: &Checkout) -> RepositoryConfig {
        self.configs.borrow().get(&checkout.folder).cloned().unwrap_or_default()
    }

    /// The variables of the session win, then those of its first repository.
    fn apply_env(&self, env: BTreeMap<String, String>) {
        let mut session = self.sandbox.session_env.borrow_mut();
        for (name, value) in env {
            session.entry(name).or_insert(value);
        }
    }
}

/// Writes the settings for later boots, and the command of the tests for programs that look for it.
fn keep(
    sandbox: &Sandbox,
    checkout: &Checkout,
    user: &User,
    config: &RepositoryConfig,
) -> io::Result<()> {
    let path = |extension| kept(sandbox, checkout, user, extension);
    let json = path("json");
    user.access(|| fs::create_dir_all(json.parent().unwrap_or(Path::new("/"))))?;
    files::write_small(&json, user, &serde_json::to_string(config)?)?;
    match config.test.as_ref().or(config.check.as_ref()) {
        Some(command) => files::write_small(&path("test"), user, command),
        None => Ok(()),
    }
}

fn kept(sandbox: &Sandbox, checkout: &Checkout, user: &User, extension: &str) -> PathBuf {
    Path::new(&sandbox.home(user)).join(KEPT).join(format!("{}.{extension}", checkout.folder))
}
