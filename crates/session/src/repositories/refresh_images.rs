//! Keeps the images of Harvest's own recipes fresh. One whose recipe has changed is rebuilt; once a
//! day also those at the bottom for which Debian has newer packages, and so what lies on them. An
//! image is published only after a sandbox has started from it, which is the provider's work.

use futures_util::StreamExt;
use harvest_gateway::ledger::DoorPurpose;
use harvest_proto::{
    AgentName, NetworkPolicy, SandboxId, SecretOwner, SessionId, UpstreamName,
    api::{CreateImage, Image, ImageLine, ImageSource, Repository},
    bridge::Command,
};
use harvest_store::{ComputeOwner, RuleOwner};
use tokio::sync::watch;

use super::{PassSpec, Repositories};
use crate::{
    checkout,
    ephemeral::{EphemeralDoor, EphemeralError, EphemeralSandbox},
    error_chain::error_chain,
    sandboxes::{Host, StartFrom},
};

const LOOK_MILLIS: u64 = 5 * 60 * 1000;

/// Prints how many packages have updates; nothing without apt.
const COUNT_UPDATES: &str = "command -v apt-get > /dev/null || exit 0\n\
    apt-get -qq update > /dev/null && apt-get -qq --simulate upgrade > /tmp/updates || exit 1\n\
    grep -c '^Inst ' /tmp/updates || true";

/// What a run did with the images.
#[derive(Debug, Default)]
pub(super) struct RefreshedImages {
    pub(super) rebuilt: Vec<String>,
    /// A line for each image that could not be looked at or built.
    pub(super) failed: Vec<String>,
}

impl Repositories {
    /// Rebuilds the images that are not up to date; with `daily` Debian's packages are looked at.
    pub(super) async fn refresh_images(&self, daily: bool) -> RefreshedImages {
        let mut refreshed = RefreshedImages::default();
        let Some(host) = self.shared.sandboxes.provider.host() else { return refreshed };
        let images = match host.image_list().await {
            Ok(images) => in_order(images),
            Err(error) => {
                refreshed.failed.push(format!("images: {}", error_chain(&error)));
                return refreshed;
            }
        };
        for (image, at_bottom) in images {
            let force = match daily && at_bottom {
                true => self.has_updates(&image).await,
                false => Ok(false),
            };
            let force = force.unwrap_or_else(|error| {
                let why = error_chain(&error);
                refreshed
                    .failed
                    .push(format!("image {}: cannot look for updates: {why}", image.name));
                false
            });
            match make(host, &image.name, force).await {
                Ok(made) if made.id != image.id => refreshed.rebuilt.push(image.name),
                Ok(_) => {}
                Err(why) => refreshed.failed.push(format!("image {}: {why}", image.name)),
            }
        }
        refreshed
    }

    /// Whether the newest build of a repository lies on another image than a build would now.
    pub(super) async fn has_other_image(&self, repository: &Repository) -> bool {
        let (Some(build), Some(host)) = (&repository.build, self.shared.sandboxes.provider.host())
        else {
            return false;
        };
        let Ok(name) = self.image(Some(repository), &AgentName::default()).await else {
            return false;
        };
        match host.image_get(&name).await {
            Ok(image) => (&build.image, build.image_id.as_ref()) != (&name, Some(&image.id)),
            // A build would fail.
            Err(_) => false,
        }
    }

    /// Whether Debian has newer packages than an image.
    async fn has_updates(&self, image: &Image) -> Result<bool, EphemeralError> {
        let shared = &self.shared;
        let pass = PassSpec {
            session: SessionId::random(),
            owner: RuleOwner::Everywhere,
            network: NetworkPolicy::Trusted,
            upstream: watch::channel(UpstreamName::scripted()).1,
            branch: None,
            secrets: vec![SecretOwner::Global],
            purpose: DoorPurpose::Work,
        };
        let policy = self.pass(&[], pass).await;
        let policy = policy.map_err(|error| EphemeralError::Other(error_chain(&error)))?;
        let door = EphemeralDoor { policy, observer: Some(Box::new(|_| {})) };
        let (id, from) = (SandboxId::random(), StartFrom::Image(image.name.clone()));
        let owner = ComputeOwner::default();
        let sandbox =
            EphemeralSandbox::start(&shared.sandboxes, id, from, Some(door), owner).await?;
        let command = checkout::command(&["/bin/sh", "-c", COUNT_UPDATES], "/", LOOK_MILLIS);
        let command = Command { user: Some("root".to_owned()), ..command };
        let counted = sandbox.bridge.run_command(command).await;
        sandbox.remove().await;
        let counted = counted?;
        match counted.ok() {
            true => Ok(counted.tail().trim().parse::<u64>().is_ok_and(|count| count > 0)),
            false => Err(EphemeralError::Other(counted.tail())),
        }
    }
}

/// Builds an image of one of Harvest's recipes, if it is not up to date.
async fn make(host: &dyn Host, name: &str, force: bool) -> Result<Image, String> {
    let order = CreateImage {
        from: ImageSource::Recipe(name.to_owned()),
        name: None,
        force,
        host_network: false,
        max_bytes: None,
    };
    let mut lines = host.image_make(order).await.map_err(|error| error_chain(&error))?;
    while let Some(line) = lines.next().await {
        match line {
            ImageLine::Made { image } => return Ok(image),
            ImageLine::Failed { message, .. } => return Err(message),
            _ => {}
        }
    }
    Err("the build ended without a result".to_owned())
}

/// The images of Harvest's recipes, each after those it lies on, and whether it is at the bottom.
fn in_order(images: Vec<Image>) -> Vec<(Image, bool)> {
    let mut images: Vec<Image> = images.into_iter().filter(Image::is_built_in).collect();
    images.sort_by_key(|image| image.layers.len());
    let lies_on = |image: &Image, other: &Image| {
        image.layers.len() > other.layers.len() && image.layers.starts_with(&other.layers)
    };
    let at_bottom: Vec<bool> =
        images.iter().map(|image| !images.iter().any(|other| lies_on(image, other))).collect();
    images.into_iter().zip(at_bottom).collect()
}

#[cfg(test)]
mod tests {
    use harvest_proto::{ImageId, Timestamp, api::ImageConfig};

    use super::*;

    fn image(name: &str, layers: &[&str], source: &str) -> Image {
        Image {
            id: ImageId::random(),
            name: name.to_owned(),
            layers: layers.iter().map(|&layer| layer.to_owned()).collect(),
            config: ImageConfig {
                env: Default::default(),
                user: "root".to_owned(),
                workdir: "/".to_owned(),
                agents: Default::default(),
            },
            recipe_key: String::new(),
            bytes: 1,
            created_at: Timestamp::from_millis(0),
            source: source.to_owned(),
        }
    }

    #[test]
    fn own_images_come_bottom_first() {
        let own = "built-in recipe, on something";
        let images = vec![
            image("agents", &["a", "b", "c"], own),
            image("mine", &["a"], "recipe, Debian bookworm"),
            image("base", &["a"], own),
            image("other", &["x", "y"], own),
        ];
        let ordered = in_order(images);
        let ordered: Vec<_> =
            ordered.iter().map(|(image, bottom)| (image.name.as_str(), *bottom)).collect();
        assert_eq!(ordered, [("base", true), ("other", true), ("agents", false)]);
    }
}
