//! Images and volumes of the fake provider.

use std::collections::BTreeMap;

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use harvest_proto::{
    ImageId, RepositoryName, Timestamp,
    api::{
        BUILT_IN_RECIPE, CreateImage, CreateVolume, DiskSpace, DiskUsage, Finding, FindingLevel,
        GarbageReport, Image, ImageConfig, ImageLine, ImageSource, ImageUsage, ImageUsers,
        NamedSize, Volume, VolumeBacking,
    },
};
use harvest_session::sandboxes::{
    Archive, Host, ImageLines, Images, ImportImage, MissingObject, SandboxError, StandbyCounts,
};

use super::Fake;

#[derive(Default)]
pub(super) struct HostState {
    images: BTreeMap<String, ImageId>,
    builds_hang: bool,
    volumes: BTreeMap<String, u64>,
    /// Repositories with a state volume.
    states: Vec<RepositoryName>,
}

impl HostState {
    pub(super) fn has_volume(&self, name: &str) -> bool {
        self.volumes.contains_key(name)
    }
}

fn image(name: &str, id: &ImageId) -> Image {
    Image {
        id: id.clone(),
        name: name.to_owned(),
        layers: vec!["lay_fake".to_owned()],
        config: config(),
        recipe_key: String::new(),
        bytes: 1,
        created_at: Timestamp::from_millis(0),
        source: BUILT_IN_RECIPE.to_owned(),
    }
}

pub(super) fn config() -> ImageConfig {
    ImageConfig {
        env: BTreeMap::new(),
        user: "root".to_owned(),
        workdir: "/".to_owned(),
        agents: BTreeMap::new(),
    }
}

impl Fake {
    /// Makes the state volume of a repository exist.
    pub fn add_state(&self, repository: &RepositoryName) {
        self.inner().host.states.push(repository.clone());
    }

    /// Makes builds of images start and never end.
    pub fn set_image_builds_hanging(&self) {
        self.inner().host.builds_hang = true;
    }

    fn make(&self, name: String, bytes: u64, force: bool) -> ImageLines {
        let mut inner = self.inner();
        if inner.host.builds_hang {
            return stream::pending().boxed();
        }
        let id = inner.host.images.entry(name.clone()).or_insert_with(ImageId::random);
        if force {
            *id = ImageId::random();
        }
        let image = image(&name, id);
        stream::iter([ImageLine::Bytes { done: bytes, total: None }, ImageLine::Made { image }])
            .boxed()
    }
}

#[async_trait]
impl Images for Fake {
    async fn image_list(&self) -> Result<Vec<Image>, SandboxError> {
        Ok(self.inner().host.images.iter().map(|(name, id)| image(name, id)).collect())
    }

    async fn image_get(&self, named: &str) -> Result<Image, SandboxError> {
        let all = self.image_list().await?.into_iter();
        let mut found = all.filter(|image| image.name == named || image.id.to_string() == named);
        found.next().ok_or_else(|| SandboxError::Missing(MissingObject::Image(named.to_owned())))
    }

    async fn image_usage(&self, named: &str) -> Result<ImageUsage, SandboxError> {
        self.image_get(named).await?;
        Ok(ImageUsage { layers: Vec::new(), used_by: ImageUsers::default() })
    }

    async fn image_make(&self, order: CreateImage) -> Result<ImageLines, SandboxError> {
        match order.from {
            ImageSource::Recipe(name) if name == "missing" => {
                Err(SandboxError::Missing(MissingObject::Recipe { name, known: Vec::new() }))
            }
            ImageSource::Recipe(name) => Ok(self.make(name, 0, order.force)),
            other => Ok(self.make(order.name.unwrap_or_else(|| format!("{other:?}")), 0, false)),
        }
    }

    async fn image_import(
        &self,
        order: ImportImage,
        mut archive: Archive,
    ) -> Result<ImageLines, SandboxError> {
        let mut bytes = 0;
        while let Some(Ok(piece)) = archive.next().await {
            bytes += piece.len() as u64;
        }
        Ok(self.make(order.name, bytes, false))
    }

    async fn image_delete(&self, named: &str) -> Result<(), SandboxError> {
        let name = self.image_get(named).await?.name;
        self.inner().host.images.remove(&name);
        Ok(())
    }
}

fn volume(name: &str, size_bytes: u64) -> Volume {
    Volume {
        name: name.to_owned(),
        backing: VolumeBacking::Folder,
        size_bytes,
        used_bytes: size_bytes,
        files: 1,
        folders: Vec::new(),
        owner: None,
        created_at: Timestamp::from_millis(0),
    }
}

#[async_trait]
impl Host for Fake {
    async fn volume_list(&self) -> Result<Vec<Volume>, SandboxError> {
        let inner = self.inner();
        let named = inner.host.volumes.iter().map(|(name, size)| volume(name, *size));
        let states = inner
            .host
            .states
            .iter()
            .map(|owner| Volume { owner: Some(owner.to_string()), ..volume("state", 1) });
        Ok(named.chain(states).collect())
    }

    async fn volume_create(&self, order: CreateVolume) -> Result<Volume, SandboxError> {
        let mut inner = self.inner();
        if inner.host.volumes.contains_key(&order.name) {
            let what = format!("volume `{}` exists already", order.name);
            return Err(SandboxError::conflict("exists", what, "choose another name"));
        }
        let size = order.size_bytes.unwrap_or(1);
        inner.host.volumes.insert(order.name.clone(), size);
        Ok(volume(&order.name, size))
    }

    async fn volume_delete(&self, name: &str) -> Result<(), SandboxError> {
        let removed = self.inner().host.volumes.remove(name);
        removed
            .map(drop)
            .ok_or_else(|| SandboxError::Missing(MissingObject::Volume(name.to_owned())))
    }

    async fn state_delete(&self, repository: &RepositoryName) -> Result<(), SandboxError> {
        self.inner().states_removed.push(repository.clone());
        Ok(())
    }

    async fn disk_usage(&self) -> Result<DiskUsage, SandboxError> {
        let space = DiskSpace { total_bytes: 2, free_bytes: 1 };
        let volumes = self.volume_list().await?;
        let images = self.image_list().await?;
        Ok(DiskUsage {
            driver: "dir".to_owned(),
            images: images
                .into_iter()
                .map(|one| NamedSize { name: one.name, bytes: one.bytes })
                .collect(),
            images_bytes: 0,
            snapshots: Vec::new(),
            snapshots_bytes: 0,
            sandboxes: Vec::new(),
            volumes_bytes: volumes.iter().map(|volume| volume.used_bytes).sum(),
            volumes,
            forge_bytes: 0,
            trash_bytes: 0,
            reclaimable_bytes: 0,
            store_file: None,
            home_disk: space,
            cache_disk: space,
        })
    }

    async fn collect(&self, _: bool) -> Result<GarbageReport, SandboxError> {
        Ok(GarbageReport::default())
    }

    async fn findings(&self) -> Result<Vec<Finding>, SandboxError> {
        let found = "always ready".to_owned();
        Ok(vec![Finding { id: "fake".to_owned(), level: FindingLevel::Ok, found, fix: None }])
    }

    async fn standby(&self) -> Option<StandbyCounts> {
        None
    }
}
