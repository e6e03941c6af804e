{{- define "diptych.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "diptych.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains (include "diptych.name" .) .Release.Name }}
{{- .Release.Name }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "diptych.name" .) }}
{{- end }}
{{- end }}

{{/* Name of the objects of a pool or of a model's router: (root, role, name). Never truncated, to avoid collisions. */}}
{{- define "diptych.objectName" -}}
{{- $name := printf "%s-%s-%s" (include "diptych.fullname" .root) .role .name }}
{{- if gt (len $name) 63 }}
{{- fail (printf "the name %s has %d characters, but Kubernetes allows 63: shorten the release, fullnameOverride, pool or model" $name (len $name)) }}
{{- end }}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) }}
{{- fail (printf "a Service cannot be named %s: start with a letter, then use a-z, 0-9 and -; see fullnameOverride" $name) }}
{{- end }}
{{- $name }}
{{- end }}

{{/* Selector labels, which never change: (root, role, name), or only (root, role), or only (root). */}}
{{- define "diptych.selectorLabels" -}}
{{- $labels := dict "app.kubernetes.io/name" (include "diptych.name" .root) "app.kubernetes.io/instance" .root.Release.Name }}
{{- with .role }}{{ $_ := set $labels "app.kubernetes.io/component" . }}{{ end }}
{{- with .name }}{{ $_ := set $labels "diptych/pool" . }}{{ end }}
{{- toYaml $labels }}
{{- end }}

{{/*
All labels: (root) and optionally role, name, model, and `extra`, user-defined labels. Selector labels are never
overridden. Pods (`pod`) get no label with the chart version, so that a new chart does not restart unchanged pods.
*/}}
{{- define "diptych.labels" -}}
{{- $labels := dict "app.kubernetes.io/managed-by" .root.Release.Service "app.kubernetes.io/part-of" "diptych" }}
{{- if not .pod }}
{{- $_ := set $labels "app.kubernetes.io/version" .root.Chart.AppVersion }}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") }}
{{- end }}
{{- $labels = mustMergeOverwrite $labels (mustDeepCopy .root.Values.commonLabels) (mustDeepCopy (.extra | default dict)) }}
{{- with .model }}{{ $_ := set $labels "diptych/model" . }}{{ end }}
{{- toYaml (mustMergeOverwrite $labels (include "diptych.selectorLabels" . | fromYaml)) }}
{{- end }}

{{- define "diptych.serviceAccountName" -}}
{{- $account := index .root.Values.serviceAccount .kind }}
{{- if $account.create }}
{{- $account.name | default (printf "%s-%s" (include "diptych.fullname" .root) .kind) }}
{{- else }}
{{- $account.name | default "default" }}
{{- end }}
{{- end }}

{{- define "diptych.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "diptych.fullname" .)) }}
{{- else }}
{{- .Values.tls.existingSecret }}
{{- end }}
{{- end }}

{{- define "diptych.scheme" -}}
{{- if include "diptych.tlsSecret" . }}https{{ else }}http{{ end }}
{{- end }}

{{/* "true" if a repository begins with a host, else "". */}}
{{- define "diptych.hasHost" -}}
{{- $first := first (splitList "/" .) }}
{{- if and (contains "/" .) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) }}true{{ end }}
{{- end }}

{{/* Worker image of a pool: cpu, cuda or rocm, cpu-nixl or cuda-nixl, and cuda-vllm; "" if there is none: (vendor, transport, engine). */}}
{{- define "diptych.imageVariant" -}}
{{- $images := dict "none" "cpu" "nvidia" "cuda" "amd" "rocm" }}
{{- if eq (.transport | default "") "nixl" }}{{ $images = dict "none" "cpu-nixl" "nvidia" "cuda-nixl" }}{{ end }}
{{- if eq (.engine | default "") "vllm" }}{{ $images = dict "nvidia" "cuda-vllm" }}{{ end }}
{{- get $images (.vendor | default "none") }}
{{- end }}

{{/*
Merged image values, as YAML: (root, kind), for a worker also `vendor` of its accelerator, `transport` of KV and `engine`, and for
a pool `image`.
*/}}
{{- define "diptych.imageValues" -}}
{{- $image := mustMergeOverwrite (dict) (mustDeepCopy (index .root.Values.images .kind)) (mustDeepCopy (.image | default dict)) }}
{{- $variant := ternary (include "diptych.imageVariant" .) "" (eq .kind "worker") }}
{{- /* The common digests do not apply to a pool with its own tag or repository. */}}
{{- if and .image (or .image.tag .image.repository) (not .image.digest) }}{{ $_ := set $image "digest" "" }}
{{- else if not $image.digest }}{{ $_ := set $image "digest" (get ($image.digests | default dict) $variant) }}
{{- end }}
{{- if not $image.tag }}
{{- if and (eq .kind "worker") (not $variant) (not $image.digest) }}
{{- $with := ternary " with engine vllm" (ternary " with kv_transport nixl" "" (eq (.transport | default "") "nixl")) (eq (.engine | default "") "vllm") }}
{{- fail (printf "no worker image is built for accelerator.vendor %s%s: set image.repository and image.tag of its pool to your own" .vendor $with) }}
{{- end }}
{{- $tag := .root.Values.images.tag | default .root.Chart.AppVersion }}
{{- $_ := set $image "tag" (ternary (printf "%s-%s" $tag $variant) $tag (ne $variant "")) }}
{{- end }}
{{- if not (include "diptych.hasHost" $image.repository) }}
{{- $whole := printf "%s/%s" (trimSuffix "/" .root.Values.images.registry) $image.repository }}
{{- if not (include "diptych.hasHost" $whole) }}
{{- fail (printf "no image is published, and %q contains no host: build and push your own (make images REGISTRY=...), and set images.registry, for example --set images.registry=ghcr.io/acme (images loaded into kind or minikube: docker.io/library)" (trimPrefix "/" $whole)) }}
{{- end }}
{{- $_ := set $image "repository" $whole }}
{{- end }}
{{- if not (regexMatch "^(\\[[0-9a-fA-F:]+\\]|[a-zA-Z0-9.-]+)(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+$" $image.repository) }}
{{- fail (printf "%q is not an image name: images.registry and repository are HOST[:PORT]/PATH, with a path in lower case and without https://, for example ghcr.io/acme" $image.repository) }}
{{- end }}
{{- toYaml $image }}
{{- end }}

{{/* Image name: (root, kind), for a pool also `image`. */}}
{{- define "diptych.image" -}}
{{- $image := include "diptych.imageValues" . | fromYaml }}
{{- if $image.digest }}
{{- printf "%s@%s" $image.repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $image.repository $image.tag }}
{{- end }}
{{- end }}

{{/* image and imagePullPolicy of a container: (root, kind), for a pool also `image`. */}}
{{- define "diptych.imageOf" -}}
image: {{ include "diptych.image" . | quote }}
imagePullPolicy: {{ (include "diptych.imageValues" . | fromYaml).pullPolicy }}
{{- end }}

{{/* Fails if the cluster does not have an API that is required: (root, api, for). */}}
{{- define "diptych.requireAPI" -}}
{{- if not (.root.Capabilities.APIVersions.Has .api) }}
{{- fail (printf "%s needs the API %s, which this cluster does not have (helm template: add --api-versions %s)" .for .api .api) }}
{{- end }}
{{- end }}
